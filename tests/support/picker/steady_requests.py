"""A client of a whole picker that never stops asking."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.whole_picker import WholePicker
from tests.support.waiting import until


@dataclass
class Traffic:
    picker: WholePicker
    went: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def run(self) -> None:
        number = 0
        while True:
            number += 1
            answer = await self.picker.ask(completion(prompt=f"request {number}"))
            if answer[0].WhichOneof("response") == "immediate_response":
                self.failed.append(str(answer[0].immediate_response))
            else:
                fields = answer[0].dynamic_metadata.fields["envoy.lb"].struct_value.fields
                self.went.append(fields["x-gateway-destination-endpoint"].string_value)

    async def only_at(self, places: Iterable[str]) -> None:
        wanted, before = set(places), len(self.went) + 1
        await until(lambda: set(self.went[before:]) >= wanted)
        assert set(self.went[before:]) == wanted
        assert self.failed == []
