"""The certificates that the ports of several pools show."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from picker.cli.options import TlsFlags
from picker.rpc.options import TlsMaterial
from picker.rpc.self_signed import self_signed
from tests.support.picker.pools_scene import SeveralPools, file_of, pool_flags, pools_picker
from tests.support.picker.whole_picker import FOUR_SCORERS, write_endpoints
from tests.support.waiting import until


@asynccontextmanager
async def showing(folder: Path, tls: TlsFlags) -> AsyncIterator[SeveralPools]:
    flags = []
    for key in ("llama", "qwen"):
        write_endpoints(file_of(folder, key), ())
        flags.append(pool_flags(key, endpoints_file=file_of(folder, key)))
    given = {"pools": tuple(flags), "config_text": FOUR_SCORERS, "tls": tls}
    async with pools_picker(folder, given) as scene:
        yield scene


async def shown(scene: SeveralPools) -> list[str]:
    ports = (scene.ports.grpc, *scene.ports.pools.values())
    return [
        await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) for port in ports
    ]


async def test_a_renewed_certificate_is_shown_at_all_ports(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()

    def put(made: TlsMaterial) -> str:
        (folder / "tls.crt").write_bytes(made.certificate_chain)
        (folder / "tls.key").write_bytes(made.private_key)
        return made.certificate_chain.decode()

    before = put(self_signed())
    async with showing(tmp_path, TlsFlags(folder, reload=True)) as scene:
        assert await shown(scene) == [before] * 3
        after = put(self_signed())
        await until(lambda: shown(scene), lambda found: found == [after] * 3)
