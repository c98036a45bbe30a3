"""/tokenize, /detokenize, /v1/models."""

from tests.support.fake_worker import FakeWorker, running_worker, say
from tests.support.gateways import CHAT, asgi_gateway
from tests.support.text_bundles import demo_bundle, small_tokenizer


async def test_tokenize_and_detokenize_are_each_others_inverse():
    text = "the capital of France 歪 \x00"
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        answer = (await gateway.client.post("/tokenize", json={"prompt": text})).json()
        assert answer["tokens"] == small_tokenizer().encode(text).ids
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 2048
        assert answer["token_strs"] is None
        back = await gateway.client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}


async def test_messages_are_tokenised_as_chat_does():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        await gateway.chat()
        body = {"messages": CHAT["messages"], "return_token_strs": True}
        answer = (await gateway.client.post("/tokenize", json=body)).json()
        assert answer["tokens"] == list(worker.submits[0].request.prompt_token_ids)
        assert answer["token_strs"][0] == "<|im_start|>"


async def test_bad_bodies_are_refused_by_name():
    async with running_worker(say("x")) as worker, asgi_gateway(worker) as gateway:
        for path, body, named in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": 7}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"prompt": "x", "model": "none"}, "none"),
            ("/tokenize", {"messages": CHAT["messages"], "tools": [{}]}, "tools"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": [5, 10**6]}, "tokens[1]"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ):
            answer = await gateway.client.post(path, json=body)
            assert answer.status_code in (400, 404), answer.text
            assert named in answer.json()["error"]["message"]


async def test_models_are_listed_and_the_first_is_the_default():
    async with running_worker(say("x"), models=("fake", "alias")) as worker:
        async with asgi_gateway(worker) as gateway:
            listed = (await gateway.client.get("/v1/models")).json()
            assert listed["object"] == "list"
            assert [card["id"] for card in listed["data"]] == ["fake", "alias"]
            assert all(card["max_model_len"] == 2048 for card in listed["data"])
            card = (await gateway.client.get("/v1/models/fake")).json()
            assert card["object"] == "model"
            assert (await gateway.client.get("/v1/models/none")).status_code == 404
            assert (await gateway.chat(model=None)).json()["model"] == "fake"
            assert (await gateway.chat(model="alias")).json()["model"] == "alias"


async def test_several_models_each_with_its_own_tokenizer():
    other = FakeWorker(say("x"), "w2", bundle=demo_bundle(), models=("demo",), max_model_len=99)
    await other.start()
    try:
        async with running_worker(say("x")) as worker, asgi_gateway(worker, other) as gateway:
            counts = {}
            for model in ("fake", "demo"):
                body = {"model": model, "prompt": "capital of France"}
                counts[model] = (await gateway.client.post("/tokenize", json=body)).json()
                assert (await gateway.chat(model=model)).status_code == 200
            assert counts["fake"]["tokens"] != counts["demo"]["tokens"]
            assert counts["demo"]["max_model_len"] == 99
            assert [len(w.submits) for w in (worker, other)] == [1, 1]
    finally:
        await other.stop()
