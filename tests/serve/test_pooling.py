"""The routes for embeddings, classes and scores, on a scripted engine."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
import pytest

from compile_and_serve.runtime.pooling.results import cosine
from compile_and_serve.runtime.pooling_params import PoolingInfo
from tests.serve.conftest import Server, StartServer
from tests.support.fake_engine import fake_rows

WIDTH = 6
EMBEDS = PoolingInfo(kind="embed", width=WIDTH)
CLASSIFIES = PoolingInfo(kind="classify", width=3, activation="softmax", labels=["a", "b", "c"])
LATE = PoolingInfo(kind="embed", width=WIDTH, pooling="all", prompts={"query": "the ", "document": "brown "})
RANKS = PoolingInfo(kind="classify", width=1, activation="sigmoid")


def embedding(server: Server, text: str, dimensions: int = WIDTH) -> np.ndarray:
    row = fake_rows(server.tokenizer.encode(text), WIDTH)[-1][:dimensions]
    return row / np.linalg.norm(row)


async def post(server: Server, path: str, **body: Any) -> Any:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_embeddings_have_openais_shape(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    answer = await post(server, "/v1/embeddings", input=["Hello", "there"])
    assert (answer["object"], answer["model"]) == ("list", "test-model")
    assert [one["index"] for one in answer["data"]] == [0, 1]
    for one, text in zip(answer["data"], ["Hello", "there"], strict=True):
        assert one["object"] == "embedding"
        np.testing.assert_allclose(one["embedding"], embedding(server, text), atol=1e-6)
    count = sum(len(server.tokenizer.encode(text)) for text in ("Hello", "there"))
    assert answer["usage"] == {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}


async def test_base64_dimensions_and_token_ids(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    ids = server.tokenizer.encode("Hello")
    answer = await post(server, "/v1/embeddings", input=[ids], encoding_format="base64", dimensions=4)
    values = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(values, embedding(server, "Hello", 4), atol=1e-6)
    answer = await post(server, "/v1/embeddings", input=ids, normalize=False)
    np.testing.assert_allclose(answer["data"][0]["embedding"], fake_rows(ids, WIDTH)[-1], atol=1e-6)


async def test_sparse_embeddings_have_the_form_of_text_embeddings_inference(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=WIDTH, is_normalized=False)})
    [answer] = await post(server, "/embed_sparse", inputs="Hello")
    row = fake_rows(server.tokenizer.encode("Hello"), WIDTH)[-1]
    assert [one["index"] for one in answer] == np.flatnonzero(row).tolist()
    np.testing.assert_allclose([one["value"] for one in answer], row[np.flatnonzero(row)], atol=1e-6)
    dense = await start_server(engine={"pooling": EMBEDS})
    assert (await dense.http.post("/embed_sparse", json={"inputs": "Hello"})).status_code == 501


async def test_prompts_by_name_and_classes_of_tokens(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=WIDTH, prompts={"query": "Hello "})})
    answer = await post(server, "/v1/embeddings", input="there", prompt_name="query")
    np.testing.assert_allclose(answer["data"][0]["embedding"], embedding(server, "Hello there"), atol=1e-6)
    wrong = await server.http.post("/v1/embeddings", json={"input": "there", "prompt_name": "passage"})
    assert wrong.status_code == 400
    assert "the model's prompts are: query" in wrong.json()["error"]["message"]
    tokens = await start_server(engine={"pooling": PoolingInfo(kind="classify", width=3, activation="softmax", pooling="all")})
    [one] = (await post(tokens, "/pooling", input="Hello", task="token_classify"))["data"]
    assert np.array(one["data"]).shape == (len(tokens.tokenizer.encode("Hello")), 3)
    np.testing.assert_allclose(np.sum(one["data"], axis=1), 1, atol=1e-5)


async def test_token_embed(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    answer = await post(server, "/pooling", input="Hello", task="token_embed", normalize=False)
    rows = fake_rows(server.tokenizer.encode("Hello"), WIDTH)
    np.testing.assert_allclose(answer["data"][0]["data"], rows, atol=1e-6)
    answer = await post(server, "/pooling", input="Hello")
    np.testing.assert_allclose(answer["data"][0]["data"], embedding(server, "Hello"), atol=1e-6)


async def test_classes(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": CLASSIFIES})
    [one] = (await post(server, "/classify", input="Hello"))["data"]
    powers = np.exp(fake_rows(server.tokenizer.encode("Hello"), 3)[-1])
    np.testing.assert_allclose(one["probs"], powers / powers.sum(), atol=1e-6)
    assert (one["label"], one["num_classes"]) == ("abc"[int(np.argmax(powers))], 3)
    [pooled] = (await post(server, "/pooling", input="Hello"))["data"]
    assert pooled["data"] == one["probs"]


async def test_scores_of_embeddings(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    texts = ["the quick", "brown", "fox"]
    answer = await post(server, "/v1/score", text_1="Hello", text_2=texts)
    wanted = [cosine(embedding(server, "Hello"), embedding(server, text)) for text in texts]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-6)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = await post(server, path, query="Hello", documents=texts, top_n=2)
        order = sorted(range(3), key=lambda i: -wanted[i])[:2]
        assert [one["index"] for one in ranked["results"]] == order
        assert [one["document"]["text"] for one in ranked["results"]] == [texts[i] for i in order]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/invocations"])
async def test_texts_are_ranked_as_in_text_embeddings_inference(start_server: StartServer, path: str) -> None:
    server = await start_server(engine={"pooling": RANKS})
    texts = ["the quick", "brown", "fox"]
    raw = [float(fake_rows(server.tokenizer.encode_pair("Hello", text), 1)[-1][0]) for text in texts]
    order = sorted(range(3), key=lambda i: -raw[i])
    answer = await post(server, path, query="Hello", texts=texts, raw_scores=True, return_text=True)
    assert [(one["index"], one["text"]) for one in answer] == [(i, texts[i]) for i in order]
    assert [one["score"] for one in answer] == pytest.approx([raw[i] for i in order], abs=1e-6)
    answer = await post(server, path, query="Hello", texts=texts)
    assert [set(one) for one in answer] == [{"index", "score"}] * 3
    assert [one["score"] for one in answer] == pytest.approx([1 / (1 + np.exp(-raw[i])) for i in order], abs=1e-6)


async def test_late_interaction_compares_tokens(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": LATE})
    answer = await post(server, "/score", text_1="Hello", text_2=["quick fox", "fox"])

    def tokens(text: str) -> np.ndarray:
        rows = fake_rows(server.tokenizer.encode(text), WIDTH)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    wanted = [(tokens("the Hello") @ tokens(f"brown {text}").T).max(1).sum() for text in ("quick fox", "fox")]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-5)


async def test_many_texts_in_one_request(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    texts = [f"fox {i}" for i in range(150)]
    answer = await post(server, "/v1/embeddings", input=texts)
    for one, text in zip(answer["data"], texts, strict=True):
        np.testing.assert_allclose(one["embedding"], embedding(server, text), atol=1e-6)


async def test_texts_are_truncated(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": RANKS})
    long = "fox " * 300
    whole = server.tokenizer.encode_pair("Hello", long)
    assert (await server.http.post("/rerank", json={"query": "Hello", "texts": [long]})).status_code == 400
    for direction, kept in ((None, whole[:256]), ("Right", whole[:256]), ("left", whole[-256:])):
        await post(server, "/rerank", query="Hello", texts=[long], truncate=True, truncation_direction=direction)
        assert server.engine.requests[-1].prompt_token_ids == kept


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/invocations"])
async def test_texts_is_another_name_of_input(start_server: StartServer, path: str) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    answers = [await post(server, path, **{name: ["Hello", "there"]}) for name in ("input", "texts")]
    assert answers[0]["data"] == answers[1]["data"]


async def test_scores_of_pairs(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": RANKS})
    answer = await post(server, "/rerank", query="Hello", documents=[{"text": "fox"}], return_documents=False)
    ids = server.tokenizer.encode_pair("Hello", "fox")
    assert server.engine.requests[0].prompt_token_ids == ids
    [result] = answer["results"]
    assert result["relevance_score"] == pytest.approx(1 / (1 + np.exp(-fake_rows(ids, 1)[-1][0])), abs=1e-6)
    assert "document" not in result


@pytest.mark.parametrize(
    ("pooling", "path", "body"),
    [
        (None, "/v1/embeddings", {"input": "a"}),
        (None, "/pooling", {"input": "a"}),
        (None, "/classify", {"input": "a"}),
        (None, "/score", {"text_1": "a", "text_2": "b"}),
        (None, "/rerank", {"query": "a", "documents": ["b"]}),
        (EMBEDS, "/classify", {"input": "a"}),
        (LATE, "/v1/embeddings", {"input": "a"}),
        (CLASSIFIES, "/v1/embeddings", {"input": "a"}),
        (CLASSIFIES, "/score", {"text_1": "a", "text_2": "b"}),
        (EMBEDS, "/v1/completions", {"prompt": "a"}),
        (EMBEDS, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_what_the_model_cannot_do_is_501(
    start_server: StartServer, pooling: PoolingInfo | None, path: str, body: dict[str, Any]
) -> None:
    server = await start_server(engine={"pooling": pooling})
    response = await server.http.post(path, json=body)
    assert response.status_code == 501
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("not_implemented_error", 501)
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "missing"),
        ("/v1/embeddings", {"input": []}, "input", "input must be"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input", "input must be"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "2049 elements"),
        ("/v1/embeddings", {"input": [[-1]]}, "input", "token id -1"),
        ("/v1/embeddings", {"input": [[1] * 257]}, "input", "257 tokens"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions", r"in \[1, 6\], got 7"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ("/score", {"text_1": "a"}, "text_2", "missing"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, None, "2 texts to compare with 1"),
        ("/v1/embeddings", {"texts": []}, "texts", "texts must be"),
        ("/v1/embeddings", {"texts": [1]}, "texts.0", "texts"),
        ("/rerank", {"query": "a"}, "documents", "missing"),
        ("/rerank", {"query": "a", "texts": []}, "texts", "list of texts"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "texts", "either"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "list of texts"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "list of texts"),
    ],
)
async def test_wrong_requests(start_server: StartServer, path: str, body: dict[str, Any], param: str | None, message: str) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    response = await server.http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


async def test_truncation(start_server: StartServer) -> None:
    server = await start_server(engine={"pooling": EMBEDS})
    ids = [3 + i % 200 for i in range(297)]
    await post(server, "/v1/embeddings", input=ids, truncate_prompt_tokens=-1)
    await post(server, "/v1/embeddings", input=ids, truncate_prompt_tokens=3, truncation_side="right")
    assert [request.prompt_token_ids for request in server.engine.requests] == [ids[-256:], ids[:3]]
