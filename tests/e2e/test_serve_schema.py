"""schemathesis reads the server's own OpenAPI document and tries to break it; a short, repeatable run.

A longer one, as it was run while this was written: `schemathesis run URL/openapi.json --max-examples 100`.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig

from tests.support.serve_process import ServeProcess

load_all_checks()
CHECKED = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.fixture(scope="module")
def server(tiny_model):
    """Its own one, with short answers: most of the requests are valid."""
    with ServeProcess.tiny(tiny_model, "--max-model-len", "24", "--num-gpu-blocks-override", "64") as process:
        yield process


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=SchemathesisConfig())


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_the_server_keeps_its_own_document(case, server):
    response = case.call(timeout=30)
    assert response.status_code != 500 and response.status_code != 503, response.text
    case.validate_response(response, checks=CHECKS.get_by_names(CHECKED))
    assert server.process.poll() is None


def test_after_all_that_nothing_is_left(server):
    server.wait_idle()
    assert "Traceback" not in server.log()
