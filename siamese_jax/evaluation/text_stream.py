"""Text that is shown while its tokens are made."""

from collections.abc import Sequence


class TextStream:
    """The text of a row's tokens as they come: characters whose last bytes are still to come are held back.

    prompt_ids: tokens of the prompt, whose text is not part of it, but may decide how its first token reads.
    """

    def __init__(self, tokenizer, prompt_ids: Sequence[int] = ()):
        self.tokenizer, self.prompt_ids, self.ids, self.shown = tokenizer, list(prompt_ids), [], ""

    def text(self) -> str:
        """Of all tokens so far; broken characters at its end are U+FFFD."""
        prompt = self.tokenizer.decode(self.prompt_ids)
        whole = self.tokenizer.decode([*self.prompt_ids, *self.ids])
        return whole[len(prompt) :] if whole.startswith(prompt) else self.tokenizer.decode(self.ids)

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """What can be shown after these tokens beyond what was shown before; last: all that is left."""
        self.ids += ids
        text = self.text()
        if not last:
            text = text.rstrip("\ufffd")
            if not text.startswith(self.shown):  # a tokenizer that reads earlier tokens in another way now
                return ""
        new, self.shown = text[len(self.shown) :], text
        return new
