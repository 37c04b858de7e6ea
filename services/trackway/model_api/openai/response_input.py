"""Items of the Responses API as chat messages."""

from collections.abc import Sequence

from pydantic import JsonValue

from trackway.model_api.conversations import SAME_FIELDS, chat_request
from trackway.wire.chat import FunctionCall, ToolCall
from trackway.wire.openai import ChatMessage, ChatRequest
from trackway.wire.responses import (
    InputFunctionCall,
    InputFunctionCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ResponsesRequest,
    ResponseTextPart,
    ResponseTool,
    ResponseToolChoice,
)


def chat_of(request: ResponsesRequest, earlier: Sequence[ChatMessage] = ()) -> ChatRequest:
    """The request as a chat. `earlier` are the messages of `previous_response_id`, for services that keep them.

    Raises RequestValidationError for what a chat cannot express.
    """
    choice = request.tool_choice
    fields: dict[str, object] = {
        **request.model_dump(include=SAME_FIELDS | {"parallel_tool_calls"}),
        "tools": [{"type": "function", "function": _function(tool)} for tool in request.tools],
        "tool_choice": {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, ResponseToolChoice)
        else choice,
        "max_completion_tokens": request.max_output_tokens,
        "response_format": None if request.text is None else request.text.format.response_format,
        "logprobs": request.has_logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
    }
    return chat_request(fields, [*_instructions(request), *earlier, *_messages(request.input)])


def _instructions(request: ResponsesRequest) -> list[ChatMessage]:
    return [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]


def _function(tool: ResponseTool) -> dict[str, JsonValue]:
    return tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)


def _messages(items: str | Sequence[InputItem]) -> list[ChatMessage]:
    """One assistant message for each run of the model's items, whatever order the client returned them in."""
    if isinstance(items, str):
        return [ChatMessage(role="user", content=items)]
    messages: list[ChatMessage] = []
    turn: ChatMessage | None = None
    before: InputItem | None = None
    for item in items:
        of_model = isinstance(item, InputFunctionCall | InputReasoning) or (
            isinstance(item, InputMessage) and item.role == "assistant"
        )
        if not of_model:
            turn = None
            messages.append(_message(item))
        elif turn is None or (isinstance(item, InputMessage) and isinstance(before, InputMessage)):
            turn = ChatMessage(role="assistant")
            messages.append(turn)
        if turn is not None:
            _extend(turn, item)
        before = item
    return messages


def _message(item: InputItem) -> ChatMessage:
    if isinstance(item, InputFunctionCallOutput):
        return ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output))
    assert isinstance(item, InputMessage)
    return ChatMessage(role=item.role, content=_text(item.content))


def _extend(turn: ChatMessage, item: InputItem) -> None:
    if isinstance(item, InputFunctionCall):
        function = FunctionCall(name=item.name, arguments=item.arguments)
        turn.tool_calls = [*turn.tool_calls, ToolCall(id=item.call_id, function=function)]
    elif isinstance(item, InputReasoning):
        if item.content:
            turn.reasoning_content = (turn.reasoning_content or "") + _text(item.content)
    elif isinstance(item, InputMessage):
        # A text after a call is the rest of the same turn.
        turn.content = f"{turn.content}{_text(item.content, '')}"


def _text(content: str | Sequence[ResponseTextPart], between: str = "\n") -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)
