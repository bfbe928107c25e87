"""Health services, and the port's TLS."""

from conformance.case import Case, Provision, Violation, case, expect
from conformance.epp.cases.sources import EPP_ROLE, HEALTH
from conformance.epp.scene import Scene
from conformance.wire.tls_relay import negotiated

_SERVING = "SERVING"


async def _is_serving(scene: Scene, service: str) -> None:
    status = await scene.health(service)
    expect(status == _SERVING, f"the service '{service}' is {status}")


@case("health-liveness", HEALTH, Provision.HEALTH)
async def liveness(scene: Scene) -> None:
    """The health service `liveness` MUST be serving while the process runs."""
    await _is_serving(scene, "liveness")


@case("health-readiness", HEALTH, Provision.HEALTH)
async def readiness(scene: Scene) -> None:
    """The health service `readiness` MUST be serving while requests are routed."""
    await _is_serving(scene, "readiness")


@case("health-ext-proc", HEALTH, Provision.HEALTH)
async def ext_proc(scene: Scene) -> None:
    """The health service with the name of ext_proc's MUST be serving while requests are routed:
    proxies check it.
    """
    await _is_serving(scene, "envoy.service.ext_proc.v3.ExternalProcessor")


@case("health-inference-extension", EPP_ROLE, Provision.HEALTH)
async def inference_extension(scene: Scene) -> None:
    """The health service `inference-extension` MUST be serving: the upstream suite's probes check
    it.
    """
    await _is_serving(scene, "inference-extension")


@case("health-of-server", HEALTH, Provision.HEALTH)
async def of_server(scene: Scene) -> None:
    """The service without a name, which stands for the whole server, MUST be serving."""
    await _is_serving(scene, "")


@case("tls-with-any-certificate", EPP_ROLE, Provision.TLS)
async def with_any_certificate(scene: Scene) -> None:
    """The port MUST use TLS, 1.2 or newer, and negotiate HTTP/2 (ALPN `h2`); a self-signed
    certificate is sufficient.
    """
    try:
        protocol, version = await negotiated(scene.picker.address)
    except OSError as error:
        raise Violation(f"no TLS at {scene.picker.address}: {error}") from error
    expect(version in ("TLSv1.2", "TLSv1.3"), f"the version is {version}")
    expect(protocol == "h2", f"the protocol agreed upon is {protocol}")


CASES: tuple[Case[Scene], ...] = (
    liveness,
    readiness,
    ext_proc,
    inference_extension,
    of_server,
    with_any_certificate,
)
