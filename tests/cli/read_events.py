"""Prints what TensorBoard reads of a folder of events, as JSON: by tag, pairs of a step and a value."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
