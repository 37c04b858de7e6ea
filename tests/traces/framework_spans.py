"""Attributes of spans as libraries wrote them for the call in `example_trace`, long ones left out."""

from pydantic import JsonValue

OPENINFERENCE: dict[str, JsonValue] = {
    "llm.system": "openai",
    "input.value": '{"model": "policy", "messages": [{"role": "user", "content": "6*9?"}], "temperature": 0.5}',
    "input.mime_type": "application/json",
    "output.value": '{"id":"chatcmpl-1","object":"chat.completion"}',
    "output.mime_type": "application/json",
    "llm.invocation_parameters": '{"model": "policy", "temperature": 0.5}',
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "6*9?",
    "llm.model_name": "tiny",
    "llm.token_count.total": 38,
    "llm.token_count.prompt": 30,
    "llm.token_count.completion": 8,
    "llm.output_messages.0.message.role": "assistant",
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "calculator",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"expression": "6*9"}',
    "llm.finish_reason": "tool_calls",
    "openinference.span.kind": "LLM",
}
"""Of openinference-instrumentation-openai 0.1.66."""

GEN_AI: dict[str, JsonValue] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.agent.name": "solver",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "policy",
    "gen_ai.input.messages": (
        '[{"role":"system","parts":[{"type":"text","content":"Be brief."}]},'
        '{"role":"user","parts":[{"type":"text","content":"6*9?"}]},'
        '{"role":"assistant","parts":[{"type":"tool_call","id":"c1","name":"calculator",'
        '"arguments":"{\\"expression\\": \\"6*9\\"}"}],"finish_reason":"tool_call"},'
        '{"role":"user","parts":[{"type":"tool_call_response","id":"c1","name":"calculator","result":"54"}]}]'
    ),
    "gen_ai.output.messages": (
        '[{"role":"assistant","parts":[{"type":"text","content":"#### 54"}],"finish_reason":"stop"}]'
    ),
    "gen_ai.usage.input_tokens": 46,
    "gen_ai.usage.output_tokens": 4,
    "gen_ai.response.model": "tiny",
    "gen_ai.response.id": "chatcmpl-2",
    "gen_ai.response.finish_reasons": ["stop"],
}
GEN_AI_TOOL: dict[str, JsonValue] = {
    "gen_ai.operation.name": "execute_tool",
    "gen_ai.tool.name": "calculator",
    "gen_ai.tool.call.id": "c1",
    "gen_ai.tool.call.arguments": '{"expression":"6*9"}',
    "gen_ai.agent.name": "solver",
    "gen_ai.tool.call.result": "54",
}
"""Of pydantic-ai."""
