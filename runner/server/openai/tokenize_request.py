"""What `/tokenize` and `/detokenize` accept: vLLM's fields."""

from typing import Annotated, Any

from pydantic import Field

from exeplan.runner.server.openai.chat_request import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, MAX_TOOLS, Message, Tool
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Lenient, Only, ServedModel, Text, TokenId


class TokenizeRequest(Lenient):
    """Either a prompt or messages; vLLM's fields."""

    model: ServedModel | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """By default of a prompt, and not of messages, whose template has them."""
    add_generation_prompt: Annotated[Any, Only(True)] = None
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_TEMPLATE_VARIABLES)
    continue_final_message: Annotated[Any, Only(False)] = None
    return_token_strs: bool = False
    tools: list[Tool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    """Only with messages."""

    def check_together(self) -> None:
        """Raises RequestError unless exactly one of the two is given."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if self.tools and self.messages is None:
            raise RequestError("tools are taken only with messages", param="tools")


class DetokenizeRequest(Lenient):
    model: ServedModel | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
