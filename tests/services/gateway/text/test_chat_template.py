"""Templates run as Hugging Face runs them, in a sandbox, and their refusals are the request's fault."""

import json

import pytest

from core.errors import InvalidRequest, ModelLoadError
from services.gateway.text.chat_template import ChatTemplate
from tests.support.text_bundles import CHAT_TEMPLATE, demo_bundle

USER = {"role": "user", "content": "Grüße <b>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "and you?"},
]
DEMO_TEMPLATE = json.loads(demo_bundle()["tokenizer_config.json"]).get("chat_template") or (
    demo_bundle()["chat_template.jinja"].decode()
)
TOOLED_TEMPLATE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set words = messages[0]['content'] %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% generation %}[{{ message.role }}] {{ message | tojson }}{% endgeneration %}

{% endfor %}
{{ words }} {{ bos_token }}{% if enable_thinking is defined and not enable_thinking %} quiet{% endif %}
"""


def render(source: str, messages=None, **options) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or [USER], **options)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, DEMO_TEMPLATE, TOOLED_TEMPLATE])
@pytest.mark.parametrize("adds_prompt", [True, False])
def test_renders_as_transformers_does(source, adds_prompt):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    expected = oracle.apply_chat_template(
        CONVERSATION, chat_template=source, tokenize=False, add_generation_prompt=adds_prompt
    )
    assert render(source, CONVERSATION, add_generation_prompt=adds_prompt) == expected


def test_continues_the_last_message_without_closing_it():
    text = render(
        CHAT_TEMPLATE,
        [USER, {"role": "assistant", "content": "The answer is "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("<|im_start|>assistant\nThe answer is")


def test_variables_reach_the_template():
    assert render(TOOLED_TEMPLATE, variables={"enable_thinking": False}).endswith("quiet")


def test_the_date_is_available():
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 + messages[0].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source):
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_is_no_jinja_is_named():
    with pytest.raises(ModelLoadError, match="chat template cannot be compiled"):
        ChatTemplate("{% for %}", {})
