"""Answers of a fleet to ten simple questions, as a table in Markdown.

Run it against `pointsman up`, with README's call and a fixed seed:

    python benchmarks/first_answers.py --url http://127.0.0.1:8080

Sampling is the model's own (`pointsman models`), as a request without parameters gets it. The same
model, quantisation and seed give the same answers on any CPU.
"""

from __future__ import annotations

from measuring import command_line, write_results
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
    parser = command_line(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first ones")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    print(f"| question | {model} |\n|---|---|")
    answers = {}
    for question in QUESTIONS[: options.questions]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        [choice] = answer.choices
        text = " ".join((choice.message.content or "").split()).replace("|", "\\|")
        cut = " …" if choice.finish_reason == "length" else ""
        answers[question] = text + cut
        print(f"| {question} | {answers[question]} |", flush=True)
    write_results(options, model=model, answers=answers)


if __name__ == "__main__":
    main()
