"""A whole cluster on one machine: the same processes that compose and Kubernetes run, as children
of one launcher.
"""
