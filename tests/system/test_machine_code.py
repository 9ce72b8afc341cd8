"""The checks of machine code themselves, on lines as nvdisasm prints them."""

from tests.system.machine_code import branches_before_their_condition


def test_a_branch_that_comes_too_early_is_found():
    """As ptxas 12.4 writes it behind __syncwarp(), and with the five cycles that it forgets."""

    def kernel(cycles):
        steps = [("LOP3.LUT P0, RZ, R0, 0x1f, RZ, 0xc0, !PT", cycles), ("BRA.DIV UR4, 0x12200", 5)]
        steps += [("NOP", 1), ("@P0 BRA `(.L_x_1)", 5), ("EXIT", 5)]
        lines = [
            f"/*{n:03x}0*/ {step} ; /* 0x{0:016x} */\n/* 0x{stall << 41:016x} */"
            for n, (step, stall) in enumerate(steps)
        ]
        return "\n".join(["", ".text.kernel:", *lines])

    assert branches_before_their_condition(kernel(2)) == ["@P0 BRA `(.L_x_1)"]
    assert not branches_before_their_condition(kernel(7))
