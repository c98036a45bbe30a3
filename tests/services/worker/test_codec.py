"""What a worker says of a step: every field arrives, and nothing that is unset is written."""

from hypothesis import given
from hypothesis import strategies as st

from core.ids import RequestId
from engine.messages import ChoiceOutput, TokenLogprobs
from services.rpc.v1 import baton_pb2 as pb
from services.worker.codec import decode_output, encode_output, fill_output

uint32 = st.integers(0, 2**32 - 1)
text = st.text(max_size=8)
logprobs = st.builds(
    TokenLogprobs,
    logprob=st.floats(-50, 0, width=32),
    rank=uint32,
    top_token_ids=st.lists(uint32, max_size=3),
    top_logprobs=st.lists(st.floats(-50, 0, width=32), max_size=3),
)
outputs = st.builds(
    ChoiceOutput,
    request_id=text.map(RequestId),
    choice=uint32,
    token_ids=st.lists(uint32, max_size=3),
    logprobs=st.lists(logprobs, max_size=2),
    finish_reason=st.sampled_from(["", "stop", "error"]),
    stop_token_id=st.none() | uint32,
    error_kind=text,
    error_message=text,
    num_cached_tokens=st.none() | uint32,
    timestamps_ms=st.dictionaries(text, st.floats(0, 1e9), max_size=3),
)


@given(outputs)
def test_an_output_survives_the_wire(output: ChoiceOutput) -> None:
    assert (
        decode_output(pb.ChoiceOutput.FromString(encode_output(output).SerializeToString()))
        == output
    )


@given(st.lists(outputs, min_size=1, max_size=3))
def test_outputs_filled_into_a_frame_are_the_frame_of_those_outputs(
    step: list[ChoiceOutput],
) -> None:
    frame = pb.WorkerFrame()
    for output in step:
        fill_output(frame.step.outputs.add(), output)
    assert frame == pb.WorkerFrame(step=pb.StepOutputs(outputs=map(encode_output, step)))


def test_a_token_costs_no_more_bytes_than_its_fields() -> None:
    output = encode_output(ChoiceOutput(RequestId("r"), 0, [7]))
    assert [field.name for field, _ in output.ListFields()] == ["request_id", "token_ids"]
    assert output.ByteSize() == 6
