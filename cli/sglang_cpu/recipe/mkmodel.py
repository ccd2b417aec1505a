"""mkmodel.py FOLDER [INNER]   writes a tiny Llama with random weights, always the same ones, and a byte-level tokenizer.

INNER: the width of its MLP. In models that users run the MLP outweighs attention at usual prompt lengths; here it does from about
8192 on. Never downloads anything. Its text is nonsense; what counts is that greedy decoding of it is deterministic.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, CONTEXT = 256, 2, 4, 512, 512, 8192


def main(folder: Path, inner: int = INNER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", CONFIG | {"intermediate_size": inner})
    write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    save_file(weights(inner), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": CONTEXT,
    "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
}


def weights(inner: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).contiguous()

    found = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in "qkvo":
            found[f"{at}self_attn.{name}_proj.weight"] = random(HIDDEN, HIDDEN)
        found[f"{at}mlp.gate_proj.weight"] = random(inner, HIDDEN)
        found[f"{at}mlp.up_proj.weight"] = random(inner, HIDDEN)
        found[f"{at}mlp.down_proj.weight"] = random(HIDDEN, inner)
        found[f"{at}input_layernorm.weight"] = torch.ones(HIDDEN)
        found[f"{at}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return found


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["hello world, the quick brown fox"], trainer)
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(inner) for inner in sys.argv[2:]))
