"""The OpenAPI document: fields with their limits, and every error."""

from __future__ import annotations

from typing import Any

from tests.serve.conftest import StartServer


async def document(start_server: StartServer, **settings: Any) -> dict[str, Any]:
    server = await start_server(**settings)
    schema: dict[str, Any] = (await server.http.get("/openapi.json")).json()
    return schema


async def test_every_route_documents_its_errors(start_server: StartServer) -> None:
    schema = await document(start_server)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "422" not in responses
            if "requestBody" in operation:
                assert {"400", "413", "415", "503", "504"} <= set(responses), path
            if "parameters" in operation:
                assert {"400", "404"} <= set(responses), path
            name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
            for status, response in responses.items():
                if status >= "400":
                    found = response["content"]["application/json"]["schema"]["$ref"]
                    assert found == f"#/components/schemas/{name}"
    assert {"Error", "AnthropicError"} <= set(schema["components"]["schemas"])


async def test_limits_are_documented_and_hold(start_server: StartServer) -> None:
    server = await start_server()
    schemas = (await server.http.get("/openapi.json")).json()["components"]["schemas"]
    requests = [
        ("/v1/chat/completions", "ChatCompletionRequest", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", "CompletionRequest", {"prompt": "x"}),
        ("/v1/responses", "ResponsesRequest", {"input": "x"}),
        ("/v1/messages", "MessagesRequest", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ]
    tried = 0
    for path, name, body in requests:
        for field, limits in schemas[name]["properties"].items():
            beyond = []
            if "minimum" in limits:
                beyond.append(limits["minimum"] - 1)
            if "exclusiveMinimum" in limits:
                beyond.append(limits["exclusiveMinimum"])
            if "maximum" in limits:
                beyond.append(limits["maximum"] + 1)
            for value in beyond:
                response = await server.http.post(path, json={**body, "logprobs": True, field: value})
                assert response.status_code == 400, (path, field, value)
                assert field in response.json()["error"]["message"]
                tried += 1
    assert tried > 40


async def test_keys_are_documented_where_they_are_needed(start_server: StartServer) -> None:
    assert "security" not in await document(start_server)
    schema = await document(start_server, api_keys=("secret",))
    assert schema["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
