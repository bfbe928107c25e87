"""Open chat prompts made of templates and topics, for a model to answer and learn from itself."""

from __future__ import annotations

import random

_TOPIC_LIST = """
    rainbows; beekeeping; the history of tea; volcanoes; learning to swim; sourdough bread; the
    moon; public libraries; bicycles; chess openings; wind turbines; the Silk Road; house cats;
    jazz music; coral reefs; compound interest; the immune system; glaciers; telling the truth;
    river otters; time zones; earthquakes; recycling plastic; watercolour painting; the printing
    press; sleep; electric cars; photosynthesis; marathon training; the Roman Empire; honey; job
    interviews; migrating birds; black holes; composting; meditation; video games; learning
    Spanish; databases; the water cycle; lighthouses; negotiation; potatoes; dinosaurs; the
    stock market; origami; knitting; vaccines; gravity; fairy tales; mountain climbing; urban
    gardening; whales; budgeting; thunderstorms; the violin; photography; ancient Egypt; robots;
    coffee; mathematics; friendship; sailing; neural networks; antibiotics; deserts; public
    speaking; the Renaissance; cheese; magnets; solar panels; haiku; the human heart; train
    travel; mushrooms; satellites; stress; camping; rice; the French Revolution; encryption;
    bridges; homework; penguins; soil; comets; cooking for one; democracy; allergies; maps;
    calendars; the internet; hummingbirds; small businesses; yoga; salt; pianos; forests; time
    management; elephants; batteries; kindness; the Olympics; tides; sharks; typography; pasta;
    inflation; fossils; teamwork; nutrition; snow; theatre; programming in Python; sorting
    algorithms; unit tests; version control; recursion; web servers; spreadsheets; pandas;
    kites; planets; running shoes; dogs; writing novels; remote work; moving to a new city;
    tigers; first aid; plastic surgery; oil lamps; castles; pirates; detectives; lost keys; a
    talking tree; a shy dragon; an old clockmaker; a city under the sea; a robot who paints; two
    rival bakers
    """
_TOPICS = tuple(" ".join(topic.split()) for topic in _TOPIC_LIST.split(";"))
_TEMPLATES = (
    "Tell me about {a}.",
    "What should I know about {a}?",
    "Explain {a} to a ten-year-old.",
    "Explain why people care about {a}.",
    "Write a short story about {a}.",
    "Write a story in which {a} and {b} both matter.",
    "Write a poem about {a}.",
    "Give me five interesting facts about {a}.",
    "List the advantages and disadvantages of {a}.",
    "How does {a} compare with {b}?",
    "What is the difference between {a} and {b}?",
    "Give me step by step advice on getting started with {a}.",
    "How can I get better at {a}?",
    "Write an email to a colleague about {a}.",
    "Write a polite letter of complaint about {a}.",
    "Write a dialogue between two friends who talk about {a}.",
    "Summarize what is known about {a} in one paragraph.",
    "What are common misconceptions about {a}?",
    "Describe a day in the life of someone who works with {a}.",
    "Plan a weekend around {a}.",
    "Write a blog post about {a}.",
    "What questions would you ask an expert on {a}?",
    "Why is {a} important?",
    "How did {a} change over the last hundred years?",
    "Make up a quiz of three questions about {a}, with answers.",
    "Can you recommend how to teach {a} in school?",
    "I am writing an essay on {a}. Can you help me with an outline?",
    "Write a product description for something related to {a}.",
    "Persuade me that {a} is worth my time.",
    "What happens if there is too much of {a}?",
    "Write a Python function that has something to do with {a}, and explain it.",
    "What is a good name for a club about {a}, and what would it do?",
    "Compose a short speech about {a} and {b}.",
    "Is {a} overrated? Answer in a few sentences.",
    "Describe {a} using all five senses.",
    "What could go wrong with {a}, and how can I prevent it?",
    "How do scientists study {a}?",
    "Imagine a world without {a}. What would be different?",
    "Give me tips for talking about {a} with children.",
    "Write a news report about {a}.",
)
_FOLLOW_UPS = (
    "Thanks. Can you say more about that?",
    "Can you make that shorter?",
    "Can you give me an example?",
    "Why is that?",
    "Rewrite that for children.",
    "What else should I consider?",
    "Turn that into a list.",
    "How sure are you about this?",
    "What would be the next step?",
    "Can you explain the last point again?",
)


def open_prompt(rng: random.Random) -> str:
    """A question or task that opens a conversation."""
    first, second = rng.sample(_TOPICS, 2)
    return rng.choice(_TEMPLATES).format(a=first, b=second)


def follow_up(rng: random.Random) -> str:
    """What a user may say after any answer."""
    return rng.choice(_FOLLOW_UPS)
