"""Shares of right answers of a model to simple prompts, as a table in Markdown.

Run it against `pointsman up` or one worker:

    python benchmarks/first_answers.py --url http://127.0.0.1:8080

Each prompt is asked `--runs` times with seeds that count from 0. Sampling is the model's own
(`pointsman models`), as a request without parameters gets it. The same model, quantisation and
seed give the same answers on any CPU. An answer is right when all of it matches the pattern beside
its prompt, and it ended by itself before `--max-tokens`. Patterns are strict: most allow a single
sentence, because they cannot judge what a model adds.
"""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from measuring import Table, command_line, write_results
from openai import OpenAI


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what all of a right answer matches."""

    prompt: str
    right: str


def sentence(words: str, never: str = r"\b\B") -> str:
    """One sentence with `words` in it, and nothing of `never`."""
    return rf"(?!.*({never}))[^.!?\n]*\b({words})\b[^.!?\n]*[.!?]?"


def items(*words: str) -> str:
    """One list or sentence with these words in this order, each once, and no other paragraph."""
    return (
        r"(?!.*\n\n.*\n\n)"
        + "".join(rf"((?!\b{word}\b).)*\b{word}\b" for word in words)
        + ("((?!" + "|".join(rf"\b{word}\b" for word in words) + ").)*")
    )


_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_OCEANS = r"(?=.*\batlantic\b)(?=.*\bpacific\b)(?=.*\bindian\b)"
_EUROPE = r"(danube|rhine|seine|thames|volga|elbe|loire|rhone|po)\b"

QUESTIONS = (
    Question("What is the capital of France?", sentence("paris", "étoile|lyon")),
    Question("What is the capital of Italy?", sentence("rome", "milan|florence")),
    Question("What is the capital of Spain?", sentence("madrid", "barcelona")),
    Question("What is the capital of Germany?", sentence("berlin", "munich|bonn")),
    Question("What is the capital of Japan?", sentence("tokyo", "osaka|kyoto")),
    Question("What is the capital of England?", sentence("london", "paris|france")),
    Question("Is Paris in France? Answer in one sentence.", sentence("yes.*france|paris is in")),
    Question("Which planet do we live on?", sentence("earth", "mars|venus|jupiter|milky")),
    Question("What is the largest planet in the solar system?", sentence("jupiter", "saturn|sun")),
    Question("Which planet is called the red planet?", sentence("mars", "venus|jupiter")),
    Question("Which star is closest to the Earth?", sentence("sun", "proxima|sirius")),
    Question("What is 2 + 2?", sentence(r"(is|=|equals|:) 4", "[35-9]")),
    Question("What is 5 + 3?", sentence(r"(is|=|equals|:) 8", "[124679]")),
    Question("What is 10 - 4?", sentence(r"(is|=|equals|:) 6", "[235789]")),
    Question("What is 7 times 8?", sentence("56", "[1-4]")),
    Question("List the days of the week.", items(*_DAYS)),
    Question("List the four seasons.", items("spring", "summer", "(?:autumn|fall)", "winter")),
    Question("How many days are in a week?", sentence("7|seven")),
    Question(
        "How many legs does a dog have?",
        r"(the answer[^.]* (4|four)\.\s*)?" + sentence("(has|have) (4|four) legs"),
    ),
    Question("How many months are in a year?", sentence("12|twelve", "days|hours")),
    Question("What color is the sky on a clear day?", sentence("blue", "green|purple|grey|gray")),
    Question("What color is grass?", sentence("green", "yellow|brown|blue")),
    Question("What do bees make?", sentence("honey", "milk")),
    Question("What do cows give us to drink?", sentence("milk", "water")),
    Question("What is the opposite of hot?", sentence("cold")),
    Question("What is the opposite of up?", sentence("down")),
    Question("Translate 'good morning' into Spanish.", sentence("buenos d[ií]as")),
    Question("Translate 'thank you' into French.", sentence("merci")),
    Question("Who wrote Romeo and Juliet?", sentence("shakespeare", r"\d")),
    Question("Who painted the Mona Lisa?", sentence("leonardo da vinci", r"\d")),
    Question(
        "Who was the first president of the United States?", sentence("george washington", "1")
    ),
    Question("Who was the first man on the moon?", sentence("armstrong", "american|july 16|buzz")),
    Question("What is the chemical symbol for water?", sentence("h2o|h₂o")),
    Question("What gas do plants take in?", sentence("carbon dioxide", "oxygen|range")),
    Question("At what temperature does water boil?", sentence("100|212", "kelvin|°k")),
    Question("What is the largest ocean?", sentence("pacific", "mariana|trench|atlantic")),
    Question("Name three oceans.", rf"{_OCEANS}(?!.*(sea|oceana|lake)\b).*"),
    Question("Name three primary colors.", items("red", "blue", "yellow")),
    Question("Name a fruit that is yellow.", sentence("bananas?|lemons?", "grape|red")),
    Question("What language is spoken in Brazil?", sentence("portuguese", "spanish|english")),
    Question(
        "Write a Python function that adds two numbers.",
        r".*def \w+\((\w+), (\w+)\):((?!\breturn\b).)*return \1 \+ \2\s.*",
    ),
    Question("Say hello.", r"(hello|hi)\b[^.!\n]*[.!]?"),
    Question(
        "Name three rivers in Europe.", rf"(?!.*\b(nile|amazon|ganges)\b)(.*\b{_EUROPE}){{3}}.*"
    ),
    Question("Write the word 'train' backwards.", sentence("niart")),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="default %(default)s")
    parser.add_argument("--runs", type=int, default=20, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16, help="requests in flight")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="the first ones")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="unused", timeout=600)
    model = client.models.list().data[0].id

    def ask(question: Question, seed: int) -> tuple[str, bool]:
        """The answer, and that it is right."""
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question.prompt}],
            max_tokens=options.max_tokens,
            seed=seed,
        )
        [choice] = answer.choices
        text = choice.message.content or ""
        found = re.fullmatch(question.right, text.strip(), re.DOTALL | re.IGNORECASE)
        return text, choice.finish_reason == "stop" and found is not None

    print(f"{model}, {options.runs} runs of each")
    table = Table("prompt <50", "right", "distinct", "commonest <60")
    answers = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        asked = {
            question: [pool.submit(ask, question, seed) for seed in range(options.runs)]
            for question in QUESTIONS[: options.prompts]
        }
        for question, futures in asked.items():
            found = [future.result() for future in futures]
            texts = Counter(" ".join(text.split()) for text, _ in found)
            [(commonest, _)] = texts.most_common(1)
            table.add(
                prompt=question.prompt,
                right=f"{sum(is_right for _, is_right in found)}/{options.runs}",
                distinct=len(texts),
                commonest=commonest[:100],
            )
            answers[question.prompt] = [{"text": text, "right": right} for text, right in found]
    write_results(options, model=model, answers=answers)


if __name__ == "__main__":
    main()
