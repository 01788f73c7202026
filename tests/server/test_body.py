"""How many bytes and values a body may have, and what half-received ones may hold together."""

import asyncio
import json

import pytest

from kvctl.server.body import BodyReader, check_values
from kvctl.server.errors import BodyTooLarge
from tests.server.live import post, read_head, request, running, until

MIB = 1 << 20
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"prompt": [1] * 70_000}, "values"),
        ({"prompt": "a", "unknown": [[]] * 5000}, "lists and objects"),
        ({"prompt": "a", "unknown": [{}] * 5000}, "lists and objects"),
        ({"prompt": "a", "unknown": dict.fromkeys(map(str, range(20_000)), 1)}, "strings"),
        ({"prompt": "a" * 99, "stop": ["x\\"] * 17_000}, "strings"),
    ],
    ids=["numbers", "lists", "objects", "keys", "strings with backslashes"],
)
def test_too_many_values_are_refused_with_their_number(body, what):
    with pytest.raises(BodyTooLarge, match=f"holds [0-9,]+ {what}, [0-9,]+ are allowed"):
        check_values(json.dumps(body).encode(), MIB)


@pytest.mark.parametrize(
    "text",
    ["a, b, c, " * 50_000, 'say "hi" ' * 50_000, "[{}, {}]" * 30_000, '{"a": "\\\\"}, ' * 30_000, "\\" * 50_001],
    ids=["commas", "quotes", "brackets", "JSON in JSON", "backslashes"],
)
def test_what_stands_in_a_text_is_no_value(text):
    check_values(json.dumps({"prompt": text}).encode(), MIB)


def test_as_many_values_as_allowed_are_read():
    check_values(json.dumps({"prompt": [1] * (MIB // 16)}).encode(), MIB)


async def test_the_limit_of_bytes_is_the_operators(make_context):
    context = make_context(max_body_bytes=1000)
    async with running(context) as (_, port):
        for size, status in ((900, 200), (1100, 413)):
            body = json.dumps({"prompt": [97], "max_tokens": 1, "user": "x" * (size - 50)}).encode()
            reader, writer = await request(port, post(COMPLETIONS, body), body)
            assert (await read_head(reader))[0] == status
            writer.close()


async def test_half_received_bodies_are_bounded_together_and_small_ones_pass_beside_them(context):
    context.bodies = BodyReader(300_000, max_held_bytes=500_000)
    async with running(context) as (_, port):
        held = [await request(port, post(COMPLETIONS, b"x" * 300_000), b"x" * 290_000) for _ in range(2)]
        await until(lambda: context.bodies.held_bytes > 400_000)
        reader, writer = await request(port, post(COMPLETIONS, b"x" * 300_000), b"x" * 290_000)
        status, headers = await read_head(reader)
        assert status == 503 and headers["retry-after"]
        body = b'{"prompt":"a","max_tokens":1}'
        small_reader, small_writer = await request(port, post(COMPLETIONS, body), body)
        assert (await read_head(small_reader))[0] == 200
        for _, other in (*held, (reader, writer), (small_reader, small_writer)):
            other.close()
        await until(lambda: context.bodies.held_bytes == 0)


async def test_one_that_sends_its_body_slowly_takes_no_place_in_the_queue(make_context):
    context = make_context(max_in_flight=1, delay_s=0.02)
    body = b'{"prompt":"a","max_tokens":50,"stream":true}'
    async with running(context) as (_, port):
        slow_reader, slow = await request(port, post(COMPLETIONS, body), body[:10])
        await asyncio.sleep(0.05)
        reader, writer = await request(port, post(COMPLETIONS, body), body)
        assert (await read_head(reader))[0] == 200
        for late in (body[10:], b""):  # the slow one is refused now, and so is a new one before it sends a body
            if late:
                slow.write(late)
            else:
                slow_reader, slow = await request(port, post(COMPLETIONS, body))
            assert (await read_head(slow_reader))[0] == 503
            slow.close()
        writer.close()


async def test_a_body_that_drips_in_is_given_up_on(context):
    """Each byte is progress; all of them together take too long."""
    context.bodies = BodyReader(1000, timeout_s=0.3)
    async with running(context) as (_, port):
        reader, writer = await request(port, post(COMPLETIONS, b"x" * 500))
        answer = asyncio.create_task(read_head(reader))
        while not answer.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        assert (await answer)[0] == 408
        writer.close()
