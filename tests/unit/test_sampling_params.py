"""SamplingParams: vLLM's names, defaults and texts; every bad value is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import warnings

import pytest

from foretell.sampling_params import UNSUPPORTED, RequestOutputKind, SamplingParams

NUMBERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
INTEGERS = (
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
    "prompt_lookup_min",
)
BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "speculate",
)


def test_defaults_are_vllms():
    params = SamplingParams()
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    assert values == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "bad_words": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "logit_bias": None,
        "allowed_token_ids": None,
        "speculate": True,
        "num_speculative_tokens": None,
        "prompt_lookup_min": None,
        "structured_outputs": None,
        "report_drafts": False,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be non-negative, got -0.1"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1"),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2"),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens must be less than or equal to max_tokens=8, got 9",
        ),
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0"),
        ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
        ({"stop": ""}, "stop cannot contain an empty string."),
        ({"bad_words": [""]}, "bad_words cannot contain an empty string."),
        (
            {"stop": "a", "detokenize": False},
            "stop strings are only supported when detokenize is True. ",
        ),
        ({"temperature": 0, "n": 2}, "n must be 1 when using greedy sampling, got 2"),
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be at least 0"),
        ({"seed": 1 << 63}, "seed must fit a signed 64-bit integer"),
        ({"stop": 5}, "stop must be a list of strings, got 5"),
        ({"stop": ["a", 5]}, "stop must contain only strings, got 5"),
        ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids must contain only integers"),
        ({"stop_token_ids": [True]}, "stop_token_ids must contain only integers"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, got 7"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias must have token ids as keys, got 'x'"),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1] must be a finite number, got nan"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
        ({"n": 16385}, "n must be at most 16384, got 16385"),
        ({"temperature": 10**400}, "temperature must be between -1e+30 and 1e+30, got 1000"),
        ({"repetition_penalty": 1e300}, "repetition_penalty must be between -1e+30 and 1e+30"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be at least 1e-30, got 1e-300"),
        ({"logit_bias": {1: 1e300}}, "logit_bias[1] must be between -1e+30 and 1e+30, got 1e+300"),
    ],
)
def test_a_bad_value_is_refused_with_its_field_and_value(values, text):
    with pytest.raises(ValueError, match=r".") as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None])
def test_a_number_is_finite_and_a_number(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a (finite )?number, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_an_integer_is_not_a_bool_a_float_or_a_string(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be an integer, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be True or False, got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_an_unsupported_vllm_field_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^{name} is not supported; leave it out. [A-Z]"):
        SamplingParams(**{name: None})


def test_an_unknown_field_is_a_value_error_that_names_the_nearest():
    with pytest.raises(ValueError, match=r"no field max_new_token; did you mean max_tokens\?"):
        SamplingParams(max_new_token=5)
    with pytest.raises(ValueError, match="no field zzz; known: n, presence_penalty"):
        SamplingParams(zzz=5)


def test_greedy_switches_every_filter_off():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert not params.wants_filter


@pytest.mark.parametrize("value", [1e-6, 0.001, 0.0099])
def test_a_tiny_temperature_is_raised_with_a_warning(value):
    with pytest.warns(UserWarning, match=r"raised to 0.01") as caught:
        params = SamplingParams(temperature=value, top_p=0.5)
    assert params.temperature == 0.01
    assert not params.greedy
    assert params.top_p == 0.5
    assert caught[0].filename == __file__


@pytest.mark.parametrize("value", [0, 0.01, 0.7, 2])
def test_an_ordinary_temperature_warns_of_nothing(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SamplingParams(temperature=value).temperature == float(value)


def test_values_are_normalised():
    params = SamplingParams(
        seed=-1,
        top_k=-1,
        stop="end",
        stop_token_ids=[3, 4],
        bad_words=["a"],
        allowed_token_ids=[5],
        logit_bias={"7": 200, 8: -200},
    )
    assert params.seed is None
    assert params.top_k == 0
    assert params.stop == params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.bad_words == params.bad_word_strings == ("a",)
    assert params.allowed_token_ids == (5,)
    assert params.logit_bias == {7: 100.0, 8: -100.0}


def test_derived_questions_are_answered_from_the_fields():
    plain = SamplingParams()
    assert not any((plain.greedy, plain.wants_filter, plain.wants_penalties, plain.wants_mask))
    assert not plain.wants_logprobs
    assert plain.speculates
    for values in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert SamplingParams(**values).wants_filter
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).wants_penalties
    for values in (
        {"logit_bias": {1: 1}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
    ):
        assert SamplingParams(**values).wants_mask
    assert SamplingParams(logprobs=0).wants_logprobs
    assert not SamplingParams(speculate=False).speculates
    assert not SamplingParams(num_speculative_tokens=0).speculates


def test_stop_ids_are_the_models_then_the_requests_each_once():
    assert SamplingParams(stop_token_ids=[7, 2, 7]).stop_ids([1, 2]) == (1, 2, 7)
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).stop_ids([1, 2]) == (7,)


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {10: 1.0}},
        {"allowed_token_ids": [3, 10]},
        {"stop_token_ids": [-1]},
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_field(values):
    (name,) = values
    params = SamplingParams(**values)
    with pytest.raises(ValueError, match=f"in {name} contain out-of-vocab token ids. .*size: 10$"):
        params.check_vocabulary(10)
    if name != "stop_token_ids":
        params.check_vocabulary(11)


def test_logprobs_are_capped_with_vllms_text():
    SamplingParams(logprobs=20, prompt_logprobs=20).check_logprobs(1000)
    with pytest.raises(
        ValueError,
        match=r"^Requested sample logprobs of 21, which is greater than max allowed: 20$",
    ):
        SamplingParams(logprobs=21).check_logprobs(1000)
    with pytest.raises(
        ValueError,
        match=r"^Requested prompt logprobs of 1000, which is greater than max allowed: 20$",
    ):
        SamplingParams(prompt_logprobs=-1).check_logprobs(1000)
    SamplingParams(logprobs=-1).check_logprobs(1000, max_logprobs=-1)


def test_an_instance_survives_copy_pickle_and_replace():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(params) == hash(copy.copy(params))
    assert dataclasses.replace(params, seed=4).seed == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5
