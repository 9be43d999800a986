"""Run the code of a chat's model card in any Python with torch and transformers, and print answers as JSON.

python run_card.py FOLDER CONVERSATIONS
"""

import json
import re
import sys
from pathlib import Path

import transformers

conversations, names = json.loads(sys.argv[2]), {"FOLDER": sys.argv[1]}
(code,) = re.findall(r"(?s)```python\n(.*?)```", Path(sys.argv[1], "README.md").read_text())
exec(code, names)
chat, encode = names["chat"], names["chat"].tokenizer
asked = {"conversation": conversations[0], "add_generation_prompt": True}
of_text = encode(encode.apply_chat_template(**asked, tokenize=False), add_special_tokens=False).input_ids
answers = [chat(turns, do_sample=False, max_new_tokens=20)[0]["generated_text"][-1] for turns in conversations]
found = {"answers": answers, "tokens": [encode.apply_chat_template(**asked, return_dict=False), of_text]}
print(json.dumps(found | {"version": transformers.__version__}))
