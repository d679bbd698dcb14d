"""Ways in which a pipeline's folder gets damaged; each takes the folder and damages it in place."""

import json


def weights_of(folder, part):
    """The part's safetensors file."""
    return next((folder / part).glob("*.safetensors"))


def edit_weights(folder, part, change):
    """``change(state)`` on the part's weights."""
    from safetensors.torch import load_file, save_file

    file = weights_of(folder, part)
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def drop_weight(folder, part):
    """Without one of its tensors."""
    edit_weights(folder, part, lambda state: state.pop(sorted(state)[1]))


def edit_json(file, change):
    """``change(content)`` on a JSON file; what it returns, if anything, takes the content's place."""
    content = json.loads(file.read_text())
    changed = change(content)
    file.write_text(json.dumps(content if changed is None else changed))


def cut(file, share=0.5):
    """Keep the first ``share`` of its bytes."""
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def shard(folder, part, pieces=3):
    """The part's weights in several files with an index, as large models have them; returns the index's path."""
    from safetensors.torch import load_file, save_file

    file = weights_of(folder, part)
    state = load_file(file)
    names, stem, where = sorted(state), file.name.removesuffix(".safetensors"), {}
    for piece in range(pieces):
        name = f"{stem}-{piece + 1:05d}-of-{pieces:05d}.safetensors"
        own = names[piece::pieces]
        save_file({key: state[key] for key in own}, file.parent / name, metadata={"format": "pt"})
        where |= dict.fromkeys(own, name)
    file.unlink()
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = file.parent / f"{file.name}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return index
