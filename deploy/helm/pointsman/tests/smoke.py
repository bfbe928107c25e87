"""`helm test`: the picker is ready and, behind its own Envoy, a model answers."""

import json
import ssl
import sys
import urllib.request

# The certificate of the picker's port is of an authority that is not known here.
tls = ssl.create_default_context()
tls.check_hostname = False
tls.verify_mode = ssl.CERT_NONE


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60, context=tls) as answer:
        return answer.read()


picker, *envoy = sys.argv[1:]
ask(f"{picker}/readyz")
sys.stdout.write("the picker is ready\n")
for url in envoy:
    model = json.loads(ask(f"{url}/v1/models"))["data"][0]["id"]
    body = {"model": model, "prompt": "Hello", "max_tokens": 4}
    answer = json.loads(ask(f"{url}/v1/completions", body))
    sys.stdout.write(f"{model} answers: {answer['choices'][0]['text']!r}\n")
