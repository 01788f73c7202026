import pytest
from transformers import PreTrainedTokenizerFast

from kvctl.engine import template_sandbox
from kvctl.engine.chat_template import ChatTemplate
from kvctl.errors import InvalidRequest, ModelBroken
from tests.support import byte_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{ message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool | tojson }}{% endfor %}
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.last = loop.index %}
    {%- if message.content is string %}
        {{- message.content.strip().upper() }}
    {%- else %}
        {%- for part in message.content %}{{ part.text }}|{% endfor %}
    {%- endif %}
{%- endfor %}
{{ ns.last }} {{ documents }} {{ thinking | default('off') }} {{ strftime_now('%Y') }}
"""
HI = {"role": "user", "content": "Hi <b>& 'all'</b> 🎉 "}
CONVERSATIONS = [
    [HI],
    [HI, {"role": "assistant", "content": "Hello\n"}, {"role": "user", "content": "Bye"}],
    [{"role": "system", "content": ""}, HI],
    [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
    [HI, {"role": "skip", "content": "x"}, {"role": "stop", "content": "y"}, HI],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<ü & 'x'>", "parameters": {"b": 1, "a": [None]}}}


@pytest.fixture(scope="module")
def theirs():
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.build_backend(), bos_token="<s>", eos_token="</s>")


def outcome(render):
    try:
        return render()
    except Exception as error:
        return type(error).__mro__[-2]  # that it raises, whatever it is


@pytest.mark.parametrize("template", [CHATML, STRICT, TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_rendering_is_that_of_transformers(theirs, template, messages, generate, tools):
    options = {"tools": tools, "documents": [{"title": "t"}], "add_generation_prompt": generate}
    expected = outcome(
        lambda: theirs.apply_chat_template(messages, chat_template=template, tokenize=False, thinking="on", **options)
    )
    ours = outcome(
        lambda: ChatTemplate({"default": template}).render(
            messages, variables={"bos_token": "<s>", "eos_token": "</s>", "thinking": "on"}, **options
        )
    )
    assert ours == expected


@pytest.mark.parametrize("words", ["Once upon", "  Once upon a time  ", "<|im_end|>", "Hi"])
def test_the_last_message_is_continued_as_in_transformers(theirs, words):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": words}]
    expected = theirs.apply_chat_template(messages, chat_template=CHATML, tokenize=False, continue_final_message=True)
    rendered = ChatTemplate({"default": CHATML}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


def test_the_last_text_of_several_parts_is_continued():
    template = ChatTemplate({"default": "{% for p in messages[-1].content %}<{{ p.text | trim }}>{% endfor %} END"})
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == "<a><b"
    assert messages[0]["content"][1]["text"] == "b "


def test_a_template_that_changes_the_words_cannot_continue_them():
    template = ChatTemplate({"default": "{{ messages[-1].content | upper }}"})
    with pytest.raises(InvalidRequest, match="changes the last message"):
        template.render(
            [{"role": "assistant", "content": "a"}], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize("last", ["", "   ", None, [{"type": "image"}]])
def test_nothing_to_continue_is_refused(last):
    template = ChatTemplate({"default": "{{ messages[-1]['content'] }}"})
    with pytest.raises(InvalidRequest):
        template.render(
            [{"role": "assistant", "content": last}], add_generation_prompt=False, continue_final_message=True
        )


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(InvalidRequest, match="Roles must alternate") as caught:
        ChatTemplate({"default": STRICT}).render([HI, HI])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages[0].nothing.deeper }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_that_breaks_out_or_breaks_is_refused(source):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        print(repr(ChatTemplate({"default": source}).render(messages)))
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 60 + "{% endcall %}" * 60,
        "{% for x in [[[]] * 9] * 9 recursive %}{{ loop([x] * 9) }}{% endfor %}",
    ],
    ids=["loops", "conditions", "macros", "calls", "recursive"],
)
def test_a_template_without_an_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(template_sandbox.WorkLimit.start, "__defaults__", (0.05,))
    with pytest.raises(InvalidRequest):
        ChatTemplate({"default": source}).render([HI])


def test_the_limit_is_one_rendering_s_not_the_templates(monkeypatch):
    monkeypatch.setattr(template_sandbox.WorkLimit.start, "__defaults__", (0.2,))
    template = ChatTemplate({"default": "{% for message in messages %}{{ message.content }}{% endfor %}"})
    for _ in range(60):
        assert template.render([HI] * 5000).startswith("Hi")


def test_loops_keep_their_properties():
    source = "{% for m in messages if m.n != 2 %}{{ loop.index }}{{ m.n }}{% if loop.last %}.{% endif %}"
    source += "{% else %}-{% endfor %}"
    template = ChatTemplate(
        {"default": source + "{% for m in messages %}{{ loop.length }}{{ loop.revindex }}{% endfor %}"}
    )
    assert template.render([{"n": i} for i in range(4)]) == "102133.44434241"
    assert template.render([]) == "-"


@pytest.mark.parametrize(
    "source",
    [
        "".join(f"{{% for a{i} in [1] %}}" for i in range(30)) + "{% endfor %}" * 30,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if 1 %}" * 150 + "{% endif %}" * 150,
        None,
    ],
    ids=["loops", "brackets", "ifs", "nothing"],
)
def test_a_template_that_python_cannot_compile_is_refused(source, tmp_path):
    with pytest.raises(InvalidRequest, match="cannot be compiled") as caught:
        ChatTemplate({"default": source})
    assert caught.value.param == "chat_template"
    with pytest.raises(ModelBroken, match="cannot be compiled"):
        ChatTemplate.load(tmp_path, {"chat_template": [{"name": "default", "template": source}]})


def test_compiling_computes_no_constants():
    ChatTemplate({"default": "{{ 9 ** (9 ** 10) }}{{ 'a' * 10 ** 15 }}"})


def test_a_template_for_tools_is_used_where_there_are_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert template.render([HI]) == "plain"
    assert template.render([HI], tools=[TOOL]) == "with tools"


def test_a_client_template_that_is_no_jinja_is_the_clients_fault():
    with pytest.raises(InvalidRequest, match="line 2") as caught:
        ChatTemplate({"default": "ok\n{% if %}"})
    assert caught.value.param == "chat_template"


def test_files_of_a_folder_in_order_of_rank(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "c"}, {"name": "tool_use", "template": "t"}]}
    assert ChatTemplate.load(tmp_path, {}) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert ChatTemplate.load(tmp_path, {}).render([]) == "j"
    assert ChatTemplate.load(tmp_path, config).render([]) == "c"
    assert ChatTemplate.load(tmp_path, config).render([], tools=[TOOL]) == "t"
    (tmp_path / "chat_template.jinja").write_text("f")
    assert ChatTemplate.load(tmp_path, config).render([]) == "f"


def test_the_demo_models_chat_is_that_of_transformers(demo_folder):
    from transformers import AutoTokenizer

    from kvctl.engine.tokenizer import Tokenizer

    ours, theirs = Tokenizer.load(demo_folder), AutoTokenizer.from_pretrained(demo_folder, local_files_only=True)
    for messages in CONVERSATIONS[:3]:
        text = ours.apply_chat_template(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
