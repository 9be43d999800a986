"""Run the code of a chat's model card, in any Python with torch: python run_card.py FOLDER CONVERSATIONS"""

import json
import re
import sys
from pathlib import Path

import transformers


def run_card(folder: str, conversations: list[list[dict]]) -> dict:
    """Return the answers to conversations, the first one's tokens in two ways, and transformers' version."""
    names = {"FOLDER": folder}
    (code,) = re.findall(r"(?s)```python\n(.*?)```", Path(folder, "README.md").read_text())
    exec(code, names)
    chat, encode = names["chat"], names["chat"].tokenizer
    asked = {"conversation": conversations[0], "add_generation_prompt": True}
    of_text = encode(encode.apply_chat_template(**asked, tokenize=False), add_special_tokens=False).input_ids
    answers = [chat(turns, do_sample=False, max_new_tokens=20)[0]["generated_text"][-1] for turns in conversations]
    tokens = [encode.apply_chat_template(**asked, return_dict=False), of_text]
    return {"answers": answers, "tokens": tokens, "version": transformers.__version__}


if __name__ == "__main__":
    print(json.dumps(run_card(sys.argv[1], json.loads(sys.argv[2]))))
