"""What the operator decided about the API. Plain data; imports no server, so that a command can build it. Floor 3."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl.units import MIB


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Keys, origins and habits of the API."""

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    response_role: str = "assistant"
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    force_include_usage: bool = False
    request_id_headers: bool = False
    log_requests: bool = False
    return_tokens_as_token_ids: bool = False
    max_body_bytes: int = 8 * MIB
