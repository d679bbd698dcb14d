"""A reward server of this package on a free port of this machine, in a thread; and requests to it."""

import contextlib
import http.client
import threading

import numpy as np
from reward_files import build

from flowgrpo_rc.rewards.remote.protocols import SERVED, Request, encode
from flowgrpo_rc.rewards.remote.server import RewardServer

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)
"""Three images, wider than no JPEG block and not square."""
PROMPTS = ["a", "b", "c"]
METADATA = [{"tag": "x"}, {}, {"tag": "z", "include": [{"class": "dog", "count": 1}]}]


@contextlib.contextmanager
def serving(path, protocol="json", name="f", **options):
    """The function ``name`` of the file, served; gives the server."""
    reward = build(path, name=name, timeout_s=options.pop("timeout_s", 60.0))
    server = RewardServer(reward, SERVED[protocol], "127.0.0.1", 0, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def request_body(protocol="json", images=IMAGES, prompts=PROMPTS, metadata=METADATA):
    """A client's request to score these."""
    protocol = SERVED[protocol]
    files = [encode(image, protocol.image_format) for image in images]
    return protocol.write_request(Request(files=files, prompts=list(prompts), metadata=list(metadata)))


def post(server, body, **headers):
    """Status and body of the answer."""
    return exchange(server, "POST", "/", body, headers)


def exchange(server, method, path, body=None, headers=None):
    """Status and body of the answer to any request."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
