"""For .venv-verifiers: the client of the package renderers asks /inference/v1/generate of a server of ours.

    python renderers_client.py URL TOKEN TOKENIZER

The last line has what it read from the answer, and whether it found from /v1/models that a long prompt does not fit.
"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from renderers import DefaultRendererConfig, OverlongPromptError, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate

READ = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "content")


async def main(url: str, token: str, tokenizer: str) -> None:
    renderer = create_renderer(load_tokenizer(tokenizer), DefaultRendererConfig())
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:

        async def ask(text: str) -> dict:
            message, sampling = {"role": "user", "content": text}, {"max_tokens": 16, "temperature": 0.5}
            return await generate(
                client=client, renderer=renderer, messages=[message], model="m", sampling_params=sampling
            )

        found, overlong = await ask("abc"), False
        try:
            await ask("abc" * 100)
        except OverlongPromptError:
            overlong = True
    print(json.dumps({name: found[name] for name in READ} | {"overlong": overlong}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
