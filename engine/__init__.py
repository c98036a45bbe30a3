"""One worker's brain: block pool, scheduler, runner, models, sampler, and the engine side of split serving.

It promises to know nothing of HTTP, gRPC or Redis: it hears and speaks through `engine.messages` only.
"""
