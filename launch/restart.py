"""What follows an exit code of train.py, as shell for the scripts that run where nothing of ours is installed."""

from launch.job import AGAIN, DONE, NEVER


def _case(codes: tuple[int, ...]) -> str:
    return "|".join(str(int(code)) for code in codes)


VERDICT = f"""\
# Of lines "CODE HOST", one a process: what follows, and the line it follows from. A code that must not be repeated
# counts before a crash, and a crash before what its peers say of it (42).
verdict() {{
    local code host answer="done"
    while read -r code host; do
        case "$code" in
            {_case(DONE)}) ;;
            {_case(NEVER)}) echo "never $code on $host"; return ;;
            {_case(AGAIN)}) [ "${{answer%% *}}" = crash ] || answer="again $code on $host" ;;
            *) [ "${{answer%% *}}" = crash ] || answer="crash $code on $host" ;;
        esac
    done
    echo "$answer"
}}
"""
