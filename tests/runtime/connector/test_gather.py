from compile_and_serve.runtime.connector.gather import GatheredTransfers
from compile_and_serve.runtime.connector.messages import FinishedTransfers


def test_a_transfer_ends_when_all_ranks_are_through_and_fails_when_one_fails() -> None:
    gathered = GatheredTransfers(3)
    gathered.add(FinishedTransfers(finished=[1, 2]))
    gathered.add(FinishedTransfers(finished=[2], failed={1: "No room."}))
    assert gathered.take() is None
    gathered.add(FinishedTransfers(failed={1: "Too late."}))
    assert gathered.take() == FinishedTransfers(failed={1: "No room."})
    gathered.add(FinishedTransfers(finished=[2, 3]))
    assert gathered.take() == FinishedTransfers(finished=[2])
    assert gathered.take() is None
    gathered.add(FinishedTransfers(finished=[3]))
    gathered.add(FinishedTransfers(finished=[3]))
    assert gathered.take() == FinishedTransfers(finished=[3])
