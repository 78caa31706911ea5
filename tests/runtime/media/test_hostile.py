"""Hostile media: spellings of URLs and files that lie. No connection is made, and memory stays flat."""

from __future__ import annotations

import base64
import io
import itertools
import resource
import socket
import struct
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

import PIL.Image

from compile_and_serve.runtime.media.fetch import FetchLimits, _is_public, fetch
from compile_and_serve.runtime.media.images import decode_image
from compile_and_serve.runtime.media.prepared import MediaError
from compile_and_serve.runtime.media.sources import data_of_url
from compile_and_serve.runtime.media.videos import decode_video

ALLOWED = "allowed.test"
HOSTS = """
127.0.0.1 127.1 127.0.1 0 0.0.0.0 2130706433 017700000001 0x7f000001 0x7f.0.0.1 0x7f.1 0177.0.0.1 127.0.0.1.
localhost LOCALHOST localhost. localhost.localdomain ip6-localhost 127.0.0.1.nip.io localtest.me
10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 169.254.169.254 169.254.170.2 100.100.100.200 100.64.0.1 192.0.0.1
198.18.0.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 192.0.2.1 198.51.100.1 203.0.113.1
[::] [::1] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1] [::127.0.0.1] [fe80::1] [fe80::1%25eth0] [fc00::1] [fd00:ec2::254]
[ff02::1] [64:ff9b::7f00:1] [2002:7f00:1::] [2001:db8::1] [2001::1]
metadata.google.internal metadata instance-data kubernetes.default.svc host.docker.internal
evil.test allowed.test.evil.test evilallowed.test allowed.test-evil.test xallowed.test allowed-test allowed.tes allowed.test.
ALLOWED.TEST.evil.test allowed%2etest allowed.test%00.evil.test allowed.test%2f.evil.test allowed。test.evil.test ａllowed.test.evil
xn--llowed-cua.test ①②⑦.⓪.⓪.① 169。254。169。254 １２７.0.0.1
""".split()
FORMS = ("http://{}/a.png", "https://{}:443/a.png")
URLS = """
file:///etc/passwd file:/etc/passwd FILE:///etc/passwd file://allowed.test/etc/passwd ftp://allowed.test/a ftps://allowed.test/a
gopher://allowed.test/_GET dict://allowed.test:11211/stats ldap://allowed.test/ tftp://allowed.test/a sftp://allowed.test/a
jar:http://allowed.test!/ netdoc:///etc/passwd ws://allowed.test/ wss://allowed.test/ javascript:alert(1) blob:http://allowed.test/1
about:blank view-source:http://allowed.test/ unix:///var/run/docker.sock http+unix://%2Fvar%2Frun%2Fdocker.sock/ s3://allowed.test/a
gs://allowed.test/a hdfs://allowed.test/a smb://allowed.test/a \\\\allowed.test\\a /etc/passwd ../../etc/passwd ./a.png a.png ~/.ssh/id_rsa
http: http:/ http:// https:// http:allowed.test http:///a.png http:/allowed.test/a //allowed.test/a.png ://allowed.test
http://user@allowed.test/ http://user:pass@allowed.test/ http://allowed.test@evil.test/ http://evil.test@allowed.test/ http://:@allowed.test/
http://allowed.test:pass@evil.test/ http://@allowed.test/ http://evil.test#@allowed.test/ http://evil.test?@allowed.test/
http://evil.test\\@allowed.test/ http://evil.test\\.allowed.test/ http://[::1 http://::1]/ http://[allowed.test]/ http://[]/ http://[::1]evil/
http://allowed.test:99999/ http://allowed.test:-1/ http://allowed.test:80:80/ http://allowed.test:abc/ http://?allowed.test http://#allowed.test
http://./ http://../ http://.. http://* http://%61llowed.test/ hTTp://evil.test/
""".split()
DATA_URLS = """
data: data:, data:image/png data:image/png, data:image/png,abc data:image/png;base64 data:;charset=utf-8,abc data:image/png;base64,!!!!
data:image/png;base64,=== data:image/png;base64,a data:image/png;base64,%41%41 data:image/png;base32,AAAA data:text/html,<script>
data:image/svg+xml;utf8,<svg/> data:image/png;base64;base64 data:image/png;base64,AAAA=AAAA data://image/png;base64 data:(;base64,AAAA
""".split()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", *, bits: int = 8, color: int = 2) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def saved(kind: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.effect_noise((32, 32), 80).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


GOOD = {kind: saved(kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")}
BOMB_TEXT = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20)))
FILES: dict[str, bytes] = {
    "png of 2^31 pixels": png(2**31 - 1, 2**31 - 1),
    "png of no pixels": png(0, 0),
    "png of no columns": png(0, 5),
    "png of 100 million pixels": png(10_000, 10_000),
    "png of one line of 2^30": png(2**30, 1),
    "png without rows": png(4000, 4000),
    "png of 3 bits": png(8, 8, bits=3),
    "png of color 9": png(8, 8, color=9),
    "gif of 65535²": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;",
    "bmp of 2^31": b"BM"
    + struct.pack("<IHHI", 54, 0, 0, 54)
    + struct.pack("<IiiHHIIiiII", 40, 2**31 - 1, 2**31 - 1, 1, 24, 0, 0, 0, 0, 0, 0),
    "tiff that points nowhere": b"II*\0\xff\xff\xff\x7f",
    "tiff of itself": b"II*\0\x08\0\0\0\0\0\x08\0\0\0",
    "webp of nothing": b"RIFF\xff\xff\xff\xffWEBPVP8X",
    "jpeg of markers": b"\xff\xd8" + b"\xff\xff" * 1000,
    "jpeg that ends": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "html": b"<html><img src=http://127.0.0.1/></html>",
    "svg": b"<?xml version='1.0'?><!DOCTYPE s [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><svg>&a;</svg>",
    "pdf": b"%PDF-1.7\n",
    "postscript": b"%!PS-Adobe-3.0\n(/etc/passwd) (r) file",
    "zip": b"PK\x03\x04" + bytes(30),
    "gzip bomb": zlib.compress(bytes(1 << 20)),
    "elf": b"\x7fELF" + bytes(60),
    "playlist": b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
    "nothing": b"",
    "one byte": b"\0",
    "zeros": bytes(1 << 16),
} | {f"{kind} cut at {part}": data[: len(data) * part // 8] for (kind, data), part in itertools.product(GOOD.items(), (1, 2, 4))}
_MIXED = {f"{kind} with a head of {other}": GOOD[other][:16] + GOOD[kind][16:] for kind, other in itertools.permutations(GOOD, 2)}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("something was asked for over the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("domains", [(), (ALLOWED,)])
def test_urls_of_other_hosts_and_schemes(domains: tuple[str, ...]) -> None:
    limits = FetchLimits(domains=domains)
    urls = [form.format(host) for form in FORMS for host in HOSTS if host != "allowed.test."] + URLS
    assert len(urls) > 200
    for url in urls:
        with pytest.raises(MediaError) as caught:
            fetch(url, "here", limits)
        assert str(caught.value).startswith("here"), url


@pytest.mark.parametrize("domains", [("*",), (ALLOWED,)])
def test_addresses_behind_names(domains: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a name resolves to, private addresses are not connected to."""
    for host in HOSTS:
        address = host.strip("[]").replace("%25", "%")
        try:
            is_public = _is_public(address)
        except ValueError:
            continue
        assert not is_public, host
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, _found=address, **__: [(2, 1, 6, "", (_found, 80))])
        with pytest.raises(MediaError, match="private address"):
            fetch(f"http://{ALLOWED}/a.png", "here", FetchLimits(domains=domains))


def test_one_private_address_among_several(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", (address, 80)) for address in ("93.184.216.34", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(MediaError, match="private address"):
        fetch(f"http://{ALLOWED}/a.png", "here", FetchLimits(domains=(ALLOWED,)))


def test_data_urls() -> None:
    for url in DATA_URLS:
        with pytest.raises(MediaError):
            decode_image(data_of_url(url, "here") or b"")
    assert data_of_url("data:image/png;base64," + base64.b64encode(b"abc").decode(), "here") == b"abc"


@pytest.mark.parametrize("decode", ["image", "video"])
def test_files(decode: str) -> None:
    """Each is decoded or refused by a sentence. The peak of the memory grows by less than two of the largest images take."""
    if decode == "video":
        pytest.importorskip("av")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    files = FILES | _MIXED | {"a text of 64 MiB in a png": GOOD["PNG"][:33] + BOMB_TEXT + GOOD["PNG"][33:]}
    for name, data in files.items():
        made, sentence = _decoded(decode, data)
        assert made is None or decode == "video" or made.mode == "RGB", name
        assert len(sentence) < 400, name
        assert "/etc/passwd" not in sentence, name
        refused += made is None
    assert refused > 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def _decoded(kind: str, data: bytes) -> tuple[Any, str]:
    """What is decoded; None and the sentence where nothing is."""
    try:
        if kind == "image":
            return decode_image(data), ""
        return decode_video(data, lambda total, fps: np.arange(min(total, 4))), ""
    except MediaError as error:
        return None, str(error)
