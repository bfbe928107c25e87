"""What a fleet answers to ten simple questions, as a table in Markdown.

Run it against `pointsman up`, with README's call and a fixed seed:

    python benchmarks/first_answers.py --url http://127.0.0.1:8080

Sampling is the model's own (`pointsman models`), as a request that says nothing gets it. The same
model, quantisation and seed give the same answers on any CPU.
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "What is 7 times 8?",
    "List the days of the week.",
    "What do bees make?",
    "Translate 'good morning' into Spanish.",
    "What is photosynthesis?",
    "Write a haiku about the sea.",
    "Give me a recipe for pancakes in three steps.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    sys.stdout.write(f"| question | {model} |\n|---|---|\n")
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        [choice] = answer.choices
        text = " ".join((choice.message.content or "").split()).replace("|", "\\|")
        cut = " …" if choice.finish_reason == "length" else ""
        sys.stdout.write(f"| {question} | {text}{cut} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
