"""What the endpoint for completions accepts: `/v1/completions`."""

from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from exeplan.runner.compute.tokens.sampling import INT_LIMITS
from exeplan.runner.server.openai.errors import RequestError
from exeplan.runner.server.openai.fields import Only, Text, TokenId
from exeplan.runner.server.openai.generation_request import MAX_LOGPROBS, GenerationRequest

MAX_PROMPTS = 1024
_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
_TokenIdLists = Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    prompt: Text | _TokenIds | _Texts | _TokenIdLists
    """Token ids are checked against the vocabulary by the engine."""
    echo: bool = False
    """The answer begins with the prompt, and with logprobs its tokens have theirs."""
    max_tokens: int | None = Field(None, ge=0, le=INT_LIMITS["max_tokens"][1])
    """By default 16, or fewer where fewer fit; 0 only with echo: the answer is the prompt."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: Annotated[Any, Only(True)] = None
    parallel_tool_calls: Annotated[Any, Only(True, False)] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    tools: Annotated[Any, Only([])] = None

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_is_wrong(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(_fault_of_prompt(value)) from None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a batch: a single prompt is a batch of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def output_limit(self) -> int | None:
        if self.max_tokens == 0:
            return 1  # The engine samples a token with the prompt's last one, and the answer leaves it out.
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for completions.

    @property
    def limit_is_default(self) -> bool:
        return self.max_tokens is None

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def scores_only(self) -> bool:
        return self.max_tokens == 0

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens must be at least 1, found 0, which is taken only with echo", param="max_tokens"
            )
        if self.max_tokens == 0 and self.min_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens 0", param="min_tokens")


def _fault_of_prompt(value: Any) -> str:
    if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
        return "must not be empty"
    if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
        return f"is a batch of {len(value)}, at most {MAX_PROMPTS} are taken"
    return "must be a string, a list of token ids, or a list of strings or of lists of token ids"
