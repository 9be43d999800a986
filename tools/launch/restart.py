"""What follows an exit code of train.py, as shell for the scripts that run where nothing of ours is installed."""

from tools.launch.job import AGAIN, DONE, NEVER


def pattern(codes: tuple[int, ...]) -> str:
    """What the shell's `case` takes for any of these codes."""
    return "|".join(str(int(code)) for code in codes)


VERDICT = f"""\
# Of lines "CODE HOST", one a process: what follows, and the line it follows from. A code that must not be repeated
# counts before a crash, and a crash before what its peers say of it (42).
verdict() {{
    local code host answer="done"
    while read -r code host; do
        case "$code" in
            {pattern(DONE)}) ;;
            {pattern(NEVER)}) echo "never $code on $host"; return ;;
            {pattern(AGAIN)}) [ "${{answer%% *}}" = crash ] || answer="again $code on $host" ;;
            *) [ "${{answer%% *}}" = crash ] || answer="crash $code on $host" ;;
        esac
    done
    echo "$answer"
}}
"""
