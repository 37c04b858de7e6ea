"""OpenAI's `/v1/responses`: a request's items as chat messages, the response as output items, whole or as events."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import JsonValue

from trackway.chat.tokenizer import ChatTokenizer
from trackway.model_api.openai.completions import LogprobWriter, openai_body
from trackway.model_api.prompts import SAME_FIELDS, chat_request
from trackway.model_api.response_builder import MessageReader, ResponseBuilder, event
from trackway.model_api.stream_decoder import Delta, by_token, joined
from trackway.wire.chat import FunctionCall, ToolCall
from trackway.wire.errors import TrackwayError
from trackway.wire.openai import ChatLogprob, ChatMessage, ChatRequest
from trackway.wire.responses import (
    AnyResponsesEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartEvent,
    ErrorEvent,
    IncompleteDetails,
    InputFunctionCall,
    InputFunctionCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    OutputTextDeltaEvent,
    OutputTextDoneEvent,
    ResponsesReply,
    ResponsesRequest,
    ResponseStateEvent,
    ResponsesUsage,
    ResponseTextPart,
    ResponseTool,
    ResponseToolChoice,
    TextOptions,
)


def chat_of_response(request: ResponsesRequest, earlier: Sequence[ChatMessage] = ()) -> ChatRequest:
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


_ECHOED = {
    "instructions",
    "max_output_tokens",
    "model",
    "parallel_tool_calls",
    "previous_response_id",
    "temperature",
    "top_p",
}


class ResponsesBuilder(ResponseBuilder):
    """Builds the one response of a request, which `chat` is in the form of a chat."""

    prefix = "resp_"

    def __init__(
        self, request: ResponsesRequest, chat: ChatRequest, tokenizer: ChatTokenizer, prompt: list[int]
    ) -> None:
        super().__init__([prompt], [MessageReader(chat, tokenizer.tool_format)])
        self._request = request
        self._created_at = float(int(time.time()))
        self._output: list[OutputItem] = []
        self._open: OutputMessage | None = None
        """The last item, while it is a message to which text may be added."""
        self._deltas: list[Delta] = []
        self._logprob_writer = LogprobWriter(tokenizer, as_token_ids=False) if request.has_logprobs else None
        self._logprobs: list[ChatLogprob] = []
        """Logprobs of tokens whose text was not sent yet."""
        self._characters = 0
        """Characters of text so far."""
        self._sent = 0
        """Events so far."""

    @property
    def items(self) -> Mapping[str, InputItem]:
        """Implement `ResponseBuilder.items`."""
        return {item.id: _sent_back(item) for item in self._output}

    def whole(self, deltas: Sequence[Delta]) -> str:
        """The response."""
        for _ in self._events(0, deltas[0]):
            pass  # the events build the items
        return self._final().model_dump_json(exclude=self._without_ids())

    def failed(self, error: TrackwayError) -> str:
        """The event `error`."""
        body = openai_body(error)["error"]
        assert isinstance(body, dict)
        param = error.detail.get("param")
        return self._event(
            ErrorEvent(
                sequence_number=self._sent,
                code=error.code.value,
                message=error.message,
                param=None if param is None else str(param),
                error=body,
            )
        )

    def _begin(self) -> Iterable[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(
                ResponseStateEvent(sequence_number=self._sent, type=kind, response=self._reply("in_progress"))
            )

    def _events(self, index: int, delta: Delta) -> Iterable[str]:
        self._deltas.append(delta)
        read, self._characters = self._characters, self._characters + len(delta.text)
        for piece in by_token(delta, read):
            if self._logprob_writer is not None:
                self._logprobs += self._logprob_writer.chat(piece)
            parts = self._readers[index].read(piece)
            for part in parts.in_order:
                yield from self._call(part) if isinstance(part, ToolCall) else self._text(part)
            if parts.finish_reason is not None:
                yield from self._close("incomplete" if parts.finish_reason == "length" else "completed")

    def _end(self) -> Iterable[str]:
        reply = self._final()
        kind = "response.completed" if reply.status == "completed" else "response.incomplete"
        yield self._event(ResponseStateEvent(sequence_number=self._sent, type=kind, response=reply))

    def _text(self, text: str) -> Iterator[str]:
        if self._open is None:
            self._open = OutputMessage(id=f"msg_{uuid.uuid4().hex}", status="in_progress", content=[])
            yield self._item("response.output_item.added", self._open)
            self._open.content.append(OutputText(text=""))
            yield self._part("response.content_part.added", self._open)
        logprobs, self._logprobs = self._logprobs, []
        self._open.content[0].text += text
        self._open.content[0].logprobs += logprobs
        yield self._event(
            OutputTextDeltaEvent(
                sequence_number=self._sent,
                item_id=self._open.id,
                output_index=len(self._output),
                delta=text,
                logprobs=logprobs,
            )
        )

    def _close(self, status: ItemStatus) -> Iterator[str]:
        """End the open message."""
        if self._open is None:
            return
        message, self._open = self._open, None
        message.status = status
        message.content[0].logprobs += self._logprobs
        yield self._event(
            OutputTextDoneEvent(
                sequence_number=self._sent,
                item_id=message.id,
                output_index=len(self._output),
                text=message.content[0].text,
                logprobs=message.content[0].logprobs,
            )
        )
        yield self._part("response.content_part.done", message)
        yield self._item("response.output_item.done", message)
        self._output.append(message)

    def _call(self, call: ToolCall) -> Iterator[str]:
        self._logprobs = []  # of the call's tokens, and of white space before it, which is dropped
        yield from self._close("completed")
        item = OutputFunctionCall(
            id=f"fc_{uuid.uuid4().hex}",
            status="in_progress",
            call_id=call.id,
            name=call.function.name,
            arguments="",
        )
        yield self._item("response.output_item.added", item)
        item.status, item.arguments = "completed", call.function.arguments
        place = len(self._output)
        yield self._event(
            ArgumentsDeltaEvent(sequence_number=self._sent, item_id=item.id, output_index=place, delta=item.arguments)
        )
        yield self._event(
            ArgumentsDoneEvent(
                sequence_number=self._sent,
                item_id=item.id,
                output_index=place,
                name=item.name,
                arguments=item.arguments,
            )
        )
        yield self._item("response.output_item.done", item)
        self._output.append(item)

    def _item(self, kind: str, item: OutputItem) -> str:
        return self._event(
            OutputItemEvent.model_validate(
                {"sequence_number": self._sent, "type": kind, "output_index": len(self._output), "item": item}
            )
        )

    def _part(self, kind: str, message: OutputMessage) -> str:
        return self._event(
            ContentPartEvent.model_validate(
                {
                    "sequence_number": self._sent,
                    "type": kind,
                    "item_id": message.id,
                    "output_index": len(self._output),
                    "part": message.content[0],
                }
            )
        )

    def _event(self, item: AnyResponsesEvent) -> str:
        self._sent += 1
        exclude = {"response": self._without_ids()} if isinstance(item, ResponseStateEvent) else None
        return event(item.model_dump_json(exclude=exclude), item.type)

    def _final(self) -> ResponsesReply:
        delta = joined(self._deltas)
        reply = self._reply("incomplete" if delta.finish_reason == "length" else "completed")
        if reply.status == "incomplete":
            reply.incomplete_details = IncompleteDetails()
        prompt, output = len(self.prompts[0]), len(delta.token_ids)
        reply.usage = ResponsesUsage(input_tokens=prompt, output_tokens=output, total_tokens=prompt + output)
        if self._request.return_token_ids:
            reply.prompt_token_ids = self.prompts[0]
            reply.token_ids, reply.weight_versions = delta.token_ids, delta.spans
        return reply

    def _reply(self, status: str) -> ResponsesReply:
        request = self._request
        return ResponsesReply.model_validate(
            {
                **request.model_dump(include=_ECHOED),
                "id": self.id,
                "created_at": self._created_at,
                "status": status,
                "output": list(self._output),
                "reasoning": request.reasoning,
                "text": {"format": _format(request)},
                "tool_choice": request.tool_choice,
                "tools": request.tools,
            }
        )

    def _without_ids(self) -> set[str]:
        return set() if self._request.return_token_ids else {"prompt_token_ids", "token_ids", "weight_versions"}


def _sent_back(item: OutputItem) -> InputItem:
    if isinstance(item, OutputFunctionCall):
        return InputFunctionCall(type=item.type, call_id=item.call_id, name=item.name, arguments=item.arguments)
    return InputMessage(role=item.role, content="".join(part.text for part in item.content))


def _format(request: ResponsesRequest) -> dict[str, JsonValue]:
    text = TextOptions() if request.text is None else request.text
    return text.format.model_dump(exclude_none=True)
