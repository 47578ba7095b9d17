"""Errors of coremltools' native module keep their words: the texts are what `[error userInfo]` prints as."""

from __future__ import annotations

import pytest
from kit_runner.error_texts import said

EXECUTION_PLAN = (
    "Failed to build the model execution plan using a model architecture file '/b/m.mlmodelc/model.mil' "
    "with error code: -14."
)
NEURAL_ENGINE = (
    r'"Error Domain=com.apple.appleneuralengine Code=8 \"processRequest:model:qos: \"direct\" Failed with status=0x1d '
    r": Program Inference error\" UserInfo={NSLocalizedDescription=processRequest:model:qos:, "
    r'NSUnderlyingError=0x600003b9c {Error Domain=NSOSStatusErrorDomain Code=-14 \"qtvr\" UserInfo={a=b}}}"'
)


def user_info(*entries: str) -> str:
    """NSDictionary's description of a userInfo."""
    return "\n".join(["{", *(f"    {entry};" for entry in entries), "}"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (user_info(f'NSLocalizedDescription = "{EXECUTION_PLAN}"'), EXECUTION_PLAN),
        (user_info("NSLocalizedDescription = refused"), "refused"),  # one word is not quoted
        (
            user_info(
                'NSLocalizedDescription = "Failed to evaluate model 0 in pipeline"',
                r'NSUnderlyingError = "Error Domain=com.apple.CoreML Code=1 \"(null)\""',
            ),
            "Failed to evaluate model 0 in pipeline (com.apple.CoreML 1)",
        ),
        (
            user_info(r'NSLocalizedDescription = "\"d\U00e9j\U00e0\" \Ud83d\Ude00 at C:\\x,\nthen\tmore"'),
            '"déjà" \N{GRINNING FACE} at C:\\x, then more',
        ),
        (
            user_info('NSLocalizedDescription = "No."', f"NSUnderlyingError = {NEURAL_ENGINE}"),
            'No. (com.apple.appleneuralengine 8: processRequest:model:qos: "direct" Failed with status=0x1d : Program '
            "Inference error) (NSOSStatusErrorDomain -14: qtvr)",
        ),
        (
            user_info('NSLocalizedFailureReason = "No room."', 'NSLocalizedDescription = "It failed."'),
            "It failed. No room.",
        ),
        (
            user_info(
                "NSDetailedErrors =     (\n        {\n            NSLocalizedDescription = inner;\n        }\n    )",
                "NSLocalizedDescription = outer",
                'NSUnderlyingError =     {\n        NSLocalizedDescription = "deeper";\n    }',
            ),
            "outer",
        ),
        (user_info('NSFilePath = "/b"', "Code = 3"), 'NSFilePath = "/b"; Code = 3;'),
        (
            f'Error compiling model: "{user_info("NSLocalizedDescription = damaged")}".',
            "Error compiling model: damaged",
        ),
        ("{\n}", "Core ML gave no description"),
    ],
)
def test_an_error_of_core_ml_is_told_in_its_own_words(text: str, expected: str) -> None:
    assert said(RuntimeError(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo", "one"),
        ("one:\n\n two\nthree", "one: two"),
        ("", "RuntimeError"),
        ("value type not convertible", "value type not convertible"),
        ("{'a': 1}\nb", "{'a': 1}"),
        ("{\n  half of it", "{ half of it"),
    ],
)
def test_any_other_error_is_told_in_its_first_line(text: str, expected: str) -> None:
    assert said(RuntimeError(text)) == expected
