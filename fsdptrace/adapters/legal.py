"""Which training states a group's hooks may find, by torch release.

Besides the plain cycle idle → forward → idle → pre_backward → post_backward → idle there are, in every release looked at
(2.6 to 2.15): forward → forward (a grouped unit, or a second module call of it), forward → pre_backward and forward →
post_backward (a partly run grouped unit), a post-forward in idle (a registered method that calls the module itself, as
``generate`` does), idle → post_backward (a final callback, or a loss on no output of the unit),
post_backward → pre_backward (a further output of the unit whose gradient comes later), and forwards inside a backward:
recomputation, where FSDPState leaves a group in pre_backward alone, reentrant checkpointing, and forwards of the user's.
``use_training_state`` sets forward or pre_backward for a moment, inside a prefetch.
"""

from __future__ import annotations

from collections.abc import Mapping

FORWARD, PRE_BACKWARD, POST_BACKWARD, IDLE = 1, 2, 3, 4

Table = Mapping[str, Mapping[bool, frozenset[int]]]

_TABLE: Table = {
    # hook: {inside a backward: states that it may find}
    "pre_forward": {
        False: frozenset({IDLE, FORWARD}),
        True: frozenset({IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD}),
    },
    "post_forward": {
        False: frozenset({FORWARD, IDLE}),
        True: frozenset({FORWARD, PRE_BACKWARD, POST_BACKWARD, IDLE}),
    },
    "pre_backward": {
        False: frozenset({IDLE, FORWARD, POST_BACKWARD}),
        True: frozenset({IDLE, FORWARD, POST_BACKWARD}),
    },
    "post_backward": {
        False: frozenset({IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD}),
        True: frozenset({IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD}),
    },
}


def legal_states(release: tuple[int, int]) -> Table:
    """The table of ``release``; one and the same for all that were looked at."""
    return _TABLE
