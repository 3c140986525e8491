"""A prompt as its tokens, asked for where its namespace's hashes are made: at the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvbm.core.answers import MAX_MEDIA, MAX_TOKENS, MOST_KEY_TEXT, MediaAsked
from kvbm.core.checks import check_text, kind_of
from kvbm.core.errors import ArgumentTypeError, ArgumentValueError
from kvbm.core.hashing import token_column
from kvbm.core.ids import Namespace, NamespaceId
from kvbm.core.questions import named


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, and all that an engine hashes of it.

    Attributes:
        tokens: ids of the whole prompt, those that stand for media among them.
        namespace: whose blocks are meant. None: those of `model`.
        model, tenant: where no namespace is given.
        salt: the request's `cache_salt`.
        lora, lora_path: name and path of its adapter, as the engine has them.
        media: images and the like, in the order of the prompt.
    """

    tokens: Sequence[int] | np.ndarray
    namespace: Namespace | NamespaceId | None = None
    model: str = ""
    tenant: str = ""
    salt: str = ""
    lora: str = ""
    lora_path: str = ""
    media: Sequence[MediaAsked] = ()

    def asked(self) -> dict[str, Any]:
        """The fields of a request. Raises ArgumentError, LayoutError: one that no catalog takes."""
        for name in ("model", "tenant", "salt", "lora", "lora_path"):
            check_text(getattr(self, name), name, 4 * MOST_KEY_TEXT)
        if (self.namespace is None) == (not self.model):
            raise ArgumentValueError("prompt", "names both or neither of namespace and model; give one of them")
        media = list(self.media)
        for at, one in enumerate(media):
            if not isinstance(one, MediaAsked):
                raise ArgumentTypeError(f"media[{at}]", f"is {kind_of(one)}; give a MediaAsked")
        tokens = token_column(self.tokens)
        if len(tokens) > MAX_TOKENS or len(media) > MAX_MEDIA:
            raise ArgumentValueError(
                "prompt", f"has {len(tokens)} tokens and {len(media)} media; give at most {MAX_TOKENS} and {MAX_MEDIA}"
            )
        return {
            "namespace": None if self.namespace is None else named(self.namespace),
            "tokens": tokens.tolist(),
            "model": self.model,
            "tenant": self.tenant,
            "salt": self.salt,
            "lora": self.lora,
            "lora_path": self.lora_path,
            "media": media,
        }


def checked_prompt(prompt: PromptTokens) -> dict[str, Any]:
    """A prompt's fields in a request. Raises ArgumentError, LayoutError."""
    if not isinstance(prompt, PromptTokens):
        raise ArgumentTypeError("prompt", f"is {kind_of(prompt)}; give PromptTokens")
    return prompt.asked()
