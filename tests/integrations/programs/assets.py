"""Small models and data under the names that published programs ask for."""

import json
from pathlib import Path

import torch

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "more", "dog", "run", "by", "with", "red", "hats"]


def sentences(count: int, seed: int) -> list[str]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=draw).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw).tolist()) for n in lengths]


def pairs(count: int, seed: int) -> list[dict[str, object]]:
    texts = zip(sentences(count, seed), sentences(count, seed + 1))
    return [
        {"sentence1": first, "sentence2": second, "label": int(len(first) > len(second)), "idx": number}
        for number, (first, second) in enumerate(texts)
    ]


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_dataset(folder: Path, name: str, splits: dict[str, list[dict[str, object]]]) -> None:
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        write_rows(folder / f"{split}.jsonl", rows)


def write_language(folder: Path) -> None:
    """Write language models, and texts for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    special = ["[UNK]", "[EOS]", "[PAD]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token="[PAD]", model_max_length=64
    )
    sizes = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    causal = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=1))
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    classifier = BertForSequenceClassification(BertConfig(**sizes, **no_dropout, num_labels=2))
    for name, model in (
        *(("HuggingFaceTB/SmolLM-360M", causal), ("causal", causal)),
        *(("bert-base-cased", classifier), ("classifier", classifier)),
    ):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    # 80 texts among empty ones, which a program leaves out: it takes the first 500 rows
    texts = [{"text": text} for text in sentences(80, 1)] + [{"text": ""} for _ in range(440)]
    write_dataset(folder / "Salesforce/wikitext", "wikitext-2-v1", {"train": texts, "validation": texts[:32]})
    write_dataset(folder / "nyu-mll/glue", "mrpc", {"train": pairs(256, 2), "validation": pairs(41, 2)})
    write_rows(folder / "train.json", pairs(40, 4))
    write_rows(folder / "validation.json", pairs(21, 6))
    (folder / "train.txt").write_text("\n".join(sentences(90, 8)))
    (folder / "validation.txt").write_text("\n".join(sentences(40, 9)))


def write_images(folder: Path) -> None:
    """Write models of images, and images with captions."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel, UNet2DModel
    from PIL import Image
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    (folder / "images").mkdir()
    draw = torch.Generator().manual_seed(0)
    for number in range(40):
        pixels = torch.randint(0, 256, (16, 16, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"images/{number:02}.png")
    captions = [{"file_name": f"{number:02}.png", "text": text} for number, text in enumerate(sentences(40, 5))]
    write_rows(folder / "images/metadata.jsonl", list(captions))
    torch.manual_seed(0)
    small = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    UNet2DModel(down_block_types=down, up_block_types=up, attention_head_dim=4, **small).save_config(folder / "unet")
    diffusion = folder / "diffusion"
    special = ["<|startoftext|>", "<|endoftext|>"]
    letters = sorted({letter for word in WORDS for letter in word})
    vocabulary = [*special, *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer(
        vocab={word: number for number, word in enumerate(vocabulary)}, merges=[], model_max_length=16
    )
    tokenizer.save_pretrained(diffusion / "tokenizer")
    text = CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    CLIPTextModel(text).save_pretrained(diffusion / "text_encoder")
    coder = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4, "sample_size": 16}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(**coder, **blocks).save_pretrained(diffusion / "vae")
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    UNet2DConditionModel(
        down_block_types=down, up_block_types=up, attention_head_dim=4, cross_attention_dim=16, **small
    ).save_pretrained(diffusion / "unet")
    DDPMScheduler(num_train_timesteps=20).save_pretrained(diffusion / "scheduler")
