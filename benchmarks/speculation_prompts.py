"""The texts that `speculation.py` asks for: written for it, none of them from any data set.

REPEATING ones want an answer that says much of its input again: edits, corrections, summaries, code
that goes on as it began. They are the tasks, of about thirty tried, at which the default model does
repeat; it is a small model, and at others (rename a function, indent JSON) it says something short
and wrong instead, which is no editing. Not all it does repeat is what it was asked for.

OPEN ones are plain questions and tasks of a chat, of other topics and in other words than
`pointsman train-draft` makes its own training prompts of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked. `is_chat`: as the user's turn of a conversation; else as text to be gone on
    with.
    """

    name: str
    text: str
    is_chat: bool = True


_RENAME = """Rewrite this Python code with the variable `x` renamed to `total`. \
Return the whole code.

```python
def average(values):
    x = 0
    count = 0
    for value in values:
        if value is None:
            continue
        x = x + value
        count = count + 1
    if count == 0:
        return None
    return x / count


def weighted_average(values, weights):
    x = 0
    total_weight = 0
    for value, weight in zip(values, weights):
        x = x + value * weight
        total_weight = total_weight + weight
    return x / total_weight
```"""

_TYPOS = """Correct the spelling mistakes in the following text. Return the corrected text only.

The harbour museum opened its doors in the spring of last year. Since then more than forty \
thousand visiters have walked through its halls. The most popular exhibit is the old pilot \
boat, which was restored by volunters over six winters. Children may climb on board and ring \
the bell. In the next room there is a collection of maps and charts, some of them three \
hundred years old. The museum is open from Tuesday to Sunday, and on the first Sunday of \
every month there is no entrance fee."""

_REPEAT = """Repeat the following text word for word.

The committee met on Thursday to discuss the budget for the new bridge. The engineers \
explained that the foundations would have to be deeper than planned, because the river bed \
is softer on the northern bank. The treasurer asked whether the additional cost could be \
spread over two years. After a long discussion the committee agreed to ask the county for a \
loan, and to report back to the members in the autumn. The meeting closed at half past nine."""

_SUMMARY = """Summarize the following article in a few sentences.

The town of Ellerby has decided to replace all of its street lamps. The old lamps, which \
were installed in 1974, use four times as much electricity as modern ones. The new lamps \
will dim themselves after midnight and become brighter when somebody walks by. The town \
expects to save about 90,000 pounds a year, so that the new lamps will have paid for \
themselves after seven years. Some residents are worried that the streets will be too dark \
at night. The mayor has promised that every resident may ask for a lamp to be kept brighter. \
The first lamps will be replaced in March, beginning with the streets around the railway \
station, and the work will be finished by the end of next year."""

_EXTRACT = """Here are the minutes of a meeting. Copy out every sentence that names a person.

Anna Brandt opened the meeting at ten. The minutes of the last meeting were approved. Peter \
Osei reported that the new server has arrived and will be installed next week. There were \
questions about the cost of the licences. Maria Lopez said that the licences have been paid \
for until December. The training for new members will take place in June. Anna Brandt \
thanked everybody and closed the meeting at noon."""

_LETTER = """Change the date in this letter from 3 May to 17 May and return the whole letter.

Dear Mrs Hartley,

Thank you for your order of twelve oak chairs and two tables. We are sorry to tell you that \
the delivery will take longer than we had planned. The chairs are ready, but the tables are \
still at the paint shop. We expect to deliver everything to your address on 3 May between \
nine and twelve in the morning. If this does not suit you, please call us, and we will find \
another day.

With kind regards,
James Whitfield
Whitfield Furniture"""

_SPELLING = """Rewrite this text in American spelling.

The colour of the harbour changes with the weather. On grey days the water looks like metal, \
and the neighbours stay at home. On bright days the centre of the town is full of \
travellers. They sit in the theatre garden, drink tea, and organise their photographs. My \
favourite place is the small library behind the museum, where nobody ever raises their \
voice."""

_FIGURES = """Add a header line to this CSV file and return the whole file.

2024-01-03,Ellerby,12.4,dry
2024-01-04,Ellerby,11.9,rain
2024-01-05,Ellerby,9.3,rain
2024-01-06,Ellerby,8.8,snow
2024-01-07,Ellerby,10.1,dry
2024-01-08,Ellerby,10.6,dry
2024-01-09,Ellerby,11.0,rain"""

_JSON = """Change the rent of Mill Lane to 640 in this JSON and return all of it.

```json
[
  {"id": 1, "name": "Oak Street", "city": "Ellerby", "rooms": 4, "rent": 950},
  {"id": 2, "name": "Mill Lane", "city": "Ellerby", "rooms": 2, "rent": 610},
  {"id": 3, "name": "Station Road", "city": "Norwick", "rooms": 3, "rent": 780},
  {"id": 4, "name": "Harbour View", "city": "Norwick", "rooms": 5, "rent": 1200}
]
```"""

_QUESTION = """Read the text and answer the question by quoting it.

The lighthouse at Corran Point was built in 1871 after three ships were lost in one winter. \
Its lamp was first fed with whale oil, then with paraffin, and since 1932 with electricity. \
The last keeper left in 1988, when the light was made automatic. Today the lighthouse \
belongs to a trust, which rents the keeper's cottage to visitors.

Question: How was the lamp of the lighthouse fed over the years, and who owns it today?"""

_BULLETS = """Turn this paragraph into a bulleted list.

First, fill the kettle with fresh water and bring it to the boil. Then warm the pot with a \
little hot water and pour it away. Put one spoon of tea in the pot for every cup, and one \
more for the pot. Pour the boiling water over the leaves and let them stand for four \
minutes. Stir once, put the lid on, and wait another minute. Finally, pour the tea through a \
strainer into the cups."""

_COMPLETE_CLASS = '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def __repr__(self):
        return f"Point({self.x}, {self.y})"


class Point3D:
    """A point in space."""

    def __init__(self, x, y, z):'''

_COMPLETE_TESTS = """import pytest

from shop.basket import Basket


def test_an_empty_basket_costs_nothing():
    basket = Basket()
    assert basket.total() == 0


def test_one_item_costs_its_price():
    basket = Basket()
    basket.add("apple", price=3, count=1)
    assert basket.total() == 3


def test_two_items_cost_the_sum_of_their_prices():
    basket = Basket()
    basket.add("apple", price=3, count=1)
    basket.add("pear", price=4, count=1)
    assert basket.total() == 7


def test_three_of_one_item_cost_three_times_its_price():"""

_COMPLETE_ROUTES = '''from flask import Flask, jsonify, request

from library import store

app = Flask(__name__)


@app.route("/books", methods=["GET"])
def list_books():
    """All books."""
    return jsonify(store.books.all())


@app.route("/books/<int:book_id>", methods=["GET"])
def get_book(book_id):
    """One book."""
    book = store.books.get(book_id)
    if book is None:
        return jsonify({"error": "no such book"}), 404
    return jsonify(book)


@app.route("/books", methods=["POST"])
def add_book():
    """A new book."""
    book = store.books.add(request.get_json())
    return jsonify(book), 201


@app.route("/authors", methods=["GET"])
def list_authors():'''

_COMPLETE_SETTINGS = '''class Settings:
    """The settings of the program."""

    def __init__(self, values):
        self._values = values

    @property
    def width(self):
        """The width of the window."""
        return self._values["width"]

    @property
    def height(self):
        """The height of the window."""
        return self._values["height"]

    @property
    def title(self):
        """The title of the window."""
        return self._values["title"]

    @property
    def colour(self):'''

_COMPLETE_SCHEMA = """CREATE TABLE customers (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    email TEXT NOT NULL,
    created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
);

CREATE TABLE suppliers (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    email TEXT NOT NULL,
    created_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
);

CREATE TABLE employees ("""

REPEATING = (
    Prompt("rename a variable", _RENAME),
    Prompt("correct the spelling", _TYPOS),
    Prompt("repeat a text", _REPEAT),
    Prompt("summarize an article", _SUMMARY),
    Prompt("extract sentences", _EXTRACT),
    Prompt("quote a text", _QUESTION),
    Prompt("paragraph to list", _BULLETS),
    Prompt("edit a letter", _LETTER),
    Prompt("change the spelling", _SPELLING),
    Prompt("add a header to CSV", _FIGURES),
    Prompt("edit JSON", _JSON),
    Prompt("complete a class", _COMPLETE_CLASS, is_chat=False),
    Prompt("complete tests", _COMPLETE_TESTS, is_chat=False),
    Prompt("complete routes", _COMPLETE_ROUTES, is_chat=False),
    Prompt("complete properties", _COMPLETE_SETTINGS, is_chat=False),
    Prompt("complete a schema", _COMPLETE_SCHEMA, is_chat=False),
)

OPEN = tuple(
    Prompt(f"open {index}", text)
    for index, text in enumerate(
        (
            "My neighbour's dog barks all night. How do I bring it up without starting a fight?",
            "What is the difference between weather and climate?",
            "I have two hours in a town I have never been to. How would you spend them?",
            "Why do onions make people cry when they cut them?",
            "Could you help me word a message to my landlord? The heating has been off for a week.",
            "Tell me a bedtime story with a hedgehog and a lantern in it.",
            "What makes a good password, and how do I remember it?",
            "How do planes stay in the air?",
            "I feel nervous before every exam. What can I do on the evening before?",
            "What would you cook with lentils, carrots and half a lemon?",
            "Who decides what a word means?",
            "Describe the smell of a bakery to somebody who has never been in one.",
            "What should I look at when I buy a used car?",
            "How does a refrigerator keep things cold?",
            "Write four lines for a birthday card to my grandmother, who loves crosswords.",
            "Is it better to rent or to buy a home? I am thirty and move often.",
        )
    )
)
