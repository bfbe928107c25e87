"""Constrained outputs: grammars are compiled while their sequences wait."""

from worker.engine.features.interface import Feature
from worker.engine.sequences.grammar import Grammars
from worker.engine.sequences.sequence import Sequence


class ConstrainedOutputs(Feature):
    name = "grammars"

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars

    def add(self, sequence: Sequence) -> None:
        if sequence.request.params.grammar is not None:
            sequence.grammar = self.grammars.compile(sequence.request.params.grammar)

    def waits(self, sequence: Sequence) -> bool:
        return sequence.grammar is not None and not sequence.grammar.done()

    def admitted(self, sequence: Sequence) -> None:
        if sequence.grammar is not None:
            sequence.matcher, sequence.grammar = sequence.grammar.result().fork(), None
