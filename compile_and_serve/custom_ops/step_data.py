"""What requests give to step inputs. This file imports no torch, for the process that schedules beside its ranks."""

StepDatum = int | float | str | bool  # a value in a request's step data
ADAPTER_SLOT = "adapter_slot"  # in step data: 1 + the slot of the LoRA adapter that a request uses
