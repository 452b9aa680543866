"""For .venv-trl: conversations in the chat templates of released models, rendered by transformers.

python render_chats.py CASES.json FOLDER

TRL has the templates as the models' folders on the Hub have them. A case is {"template": NAME, "args": {…}, "tools":
[…]}; CASES.json has a list "cases" and a list "conversations". FOLDER/N holds for case N a byte-level tokenizer with
the template, and chats.json: of each conversation the ids "prompt" (with the start of an answer) and "whole" (without),
or null if the template refuses it. The last line on stdout names the versions.
"""

import json
import sys
from pathlib import Path

import jinja2
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def tokenizer_with(template: str) -> transformers.PreTrainedTokenizerFast:
    """One token per byte, and the special tokens; no token is added to text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    named = dict(zip(("bos_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)


def ids(fast: transformers.PreTrainedTokenizerFast, messages: list, case: dict, start: bool) -> list[int] | None:
    """The conversation as token ids; None if the template refuses it."""
    tools = case["tools"] or None
    try:
        made = fast.apply_chat_template(messages, tools=tools, add_generation_prompt=start, **case["args"])
    except jinja2.exceptions.TemplateError:
        return None
    return made["input_ids"]


def main() -> None:
    given, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    templates = Path(trl.__file__).parent / "chat_templates"
    for number, case in enumerate(given["cases"]):
        fast = tokenizer_with((templates / f"{case['template']}.jinja").read_text())
        fast.save_pretrained(out / str(number))
        rows = [
            {"prompt": ids(fast, messages, case, True), "whole": ids(fast, messages, case, False)}
            for messages in given["conversations"]
        ]
        (out / str(number) / "chats.json").write_text(json.dumps(rows))
    print(json.dumps({"trl": trl.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
