"""Accumulators that a kernel reads while the tensor core still writes them: found in its PTX.

PTX leaves such a read undefined, and the assembler mends it in some kernels only. LLVM makes one where nothing ties a read to
the wait before it (`mosaic.here` does), as soon as both stand in one block: after a loop that it has unrolled.
"""

from __future__ import annotations

import re

_PRODUCT = re.compile(r"wgmma\.mma_async[^{]*\{([^}]*)\}")
_COMMIT = re.compile(r"wgmma\.commit_group")
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"(\$L\w+):")
_BRANCH = re.compile(r"\s*(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L\w+)")
_END = re.compile(r"\s*(?:ret|exit|trap);")
MOST_GROUPS = 8
"""In flight that are told apart; a kernel has two at most."""


def _blocks(lines: list[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """({block: its lines}, {block: the blocks that may follow}) of a function whose first block is ""."""
    name, blocks, after = "", {"": []}, {"": []}

    def begin(new: str, follows: bool) -> str:
        if follows:
            after[name].append(new)
        blocks[new], after[new] = [], after.get(new, [])
        return new

    falls_through = True
    for line in lines:
        if label := _LABEL.match(line):
            name, falls_through = begin(label[1], falls_through), True
            continue
        blocks[name].append(line)
        if branch := _BRANCH.match(line):
            after[name].append(branch[2])
            name, falls_through = begin(f"{name}+", branch[1] is not None), True
        elif _END.match(line):
            falls_through = False
    return blocks, after


def early_reads(ptx: str) -> list[str]:
    """Instructions that read or write an accumulator of products that no wait has made complete."""
    found: dict[str, None] = {}
    for function in ptx.split(".entry")[1:]:
        blocks, after = _blocks(function.splitlines())
        seen, todo = set(), [("", frozenset(), ())]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            name, issued, groups = state
            for line in blocks.get(name, ()):
                text = line.split("//")[0]
                if product := _PRODUCT.search(text):
                    issued |= frozenset(_REGISTER.findall(product[1]))
                elif _COMMIT.search(text):
                    issued, groups = frozenset(), (*groups, issued)[-MOST_GROUPS:]
                elif wait := _WAIT.search(text):
                    groups = groups[max(0, len(groups) - int(wait[1])) :]
                elif issued.union(*groups).intersection(_REGISTER.findall(text)):
                    found[text.strip()] = None
            todo += [(following, issued, groups) for following in after.get(name, ())]
    return list(found)
