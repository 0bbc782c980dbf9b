"""The draft, the unrolled step and the loss, restated from the definition: loops over positions, float64, no shortcuts.

Slow and plain on purpose; imports nothing of ours. `p` maps a served checkpoint's names to float64 tensors, `c` is
anything with the attributes of a served config (sizes, options, rope).

Position i of a document x_0 .. x_{T-1} with aux states a, last states l, mask m (1 where the target wrote the token):
    step 0 reads g_i = fc(a_i) and x_{i+1}; step s > 0 its own state of step s-1 at i and x_{i+1+s};
    the rotary position is i + s;
    it sees the step-0 keys at positions <= i of its document and its own position's keys of steps 1..s;
    it learns softmax(head(norm(l_{i+1+s}))), the distribution of x_{i+2+s};
    P_s = {i : m_{i+1} .. m_{i+1+s} all 1 and i+2+s < T}.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mscale(factor, scale):
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_frequencies(c, width):
    """-> frequencies [width/2], factor on cos and sin"""
    scaling = c.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    frequencies = [c.rope_theta ** (-2 * k / width) for k in range(width // 2)]
    if kind == "default":
        return torch.tensor(frequencies, dtype=torch.float64), 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return torch.tensor([f / factor for f in frequencies], dtype=torch.float64), 1.0
    length = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high, result = scaling["low_freq_factor"], scaling["high_freq_factor"], []
        for f in frequencies:
            turns = length * f / (2 * math.pi)
            smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
            result.append((1 - smooth) * f / factor + smooth * f)
        return torch.tensor(result, dtype=torch.float64), 1.0
    assert kind == "yarn"

    def dimension(turns):
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), width - 1)
    result = []
    for k, f in enumerate(frequencies):
        ramp = min(1.0, max(0.0, (k - low) / max(high - low, 0.001)))
        result.append(f / factor * ramp + f * (1 - ramp))
    if c.form == "mla" or ("mscale" in scaling and "mscale_all_dim" in scaling):
        both = mscale(factor, scaling.get("mscale", 1.0)) / mscale(factor, scaling.get("mscale_all_dim", 0.0))
    else:
        both = mscale(factor, 1.0)
    return torch.tensor(result, dtype=torch.float64), both


def rotate(c, x, position):
    """x [heads, width] turned to `position`: Llama pairs (k, k + width/2), DeepSeek (2k, 2k + 1)"""
    width = x.shape[-1]
    frequencies, factor = rope_frequencies(c, width)
    cos, sin = torch.cos(position * frequencies) * factor, torch.sin(position * frequencies) * factor
    result = torch.empty_like(x)
    even = range(0, width, 2) if c.form == "mla" else range(width // 2)
    for k, first in enumerate(even):
        second = first + 1 if c.form == "mla" else first + width // 2
        result[:, first] = x[:, first] * cos[k] - x[:, second] * sin[k]
        result[:, second] = x[:, second] * cos[k] + x[:, first] * sin[k]
    return result


def query_key_value(p, c, x, position):
    """x [2H] -> query [h, d], key [h, d], value [h, dv]: grouped keys repeated for each of their queries"""
    name = "midlayer.self_attn."
    heads, eps = c.num_attention_heads, c.rms_norm_eps
    if c.form == "llama":
        query = (p[name + "q_proj.weight"] @ x).view(heads, -1)
        key = (p[name + "k_proj.weight"] @ x).view(c.num_key_value_heads, -1)
        value = (p[name + "v_proj.weight"] @ x).view(c.num_key_value_heads, -1)
        owner = [head * c.num_key_value_heads // heads for head in range(heads)]
        return rotate(c, query, position), rotate(c, key, position)[owner], value[owner]
    nope, rope, latent = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    if c.q_lora_rank:
        low = rms_norm(p[name + "q_a_proj.weight"] @ x, p[name + "q_a_layernorm.weight"], eps)
        query = p[name + "q_b_proj.weight"] @ low
    else:
        query = p[name + "q_proj.weight"] @ x
    query = query.view(heads, nope + rope)
    query = torch.cat([query[:, :nope], rotate(c, query[:, nope:], position)], 1)
    down = p[name + "kv_a_proj_with_mqa.weight"] @ x
    low = rms_norm(down[:latent], p[name + "kv_a_layernorm.weight"], eps)
    both = (p[name + "kv_b_proj.weight"] @ low).view(heads, nope + c.v_head_dim)
    turned = rotate(c, down[latent:].view(1, rope), position).expand(heads, rope)
    return query, torch.cat([both[:, :nope], turned], 1), both[:, nope:]


def softmax_scale(c):
    if c.form == "llama":
        return c.head_dim**-0.5
    scaling = c.rope_scaling or {}
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * mscale(
        scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0)
    ) ** 2


def fuse(p, c, aux):
    """aux states [A*H] of one position -> g [H]"""
    if c.norm_before_fc:
        aux = rms_norm(aux, p["input_norm.weight"], c.rms_norm_eps)
    if c.fc_norm:
        chunks = aux.view(c.num_aux, -1)
        aux = torch.cat([rms_norm(x, p[f"fc_norm.{k}.weight"], c.rms_norm_eps) for k, x in enumerate(chunks)])
    return p["fc.weight"] @ aux


def unrolled_step(
    p,
    c,
    *,
    input_ids,
    loss_mask,
    aux_hidden,
    last_hidden,
    offsets,
    target_norm,
    target_norm_eps,
    target_head,
    draft_to_target,
    steps,
    step_weight,
    counts=None,
):
    """-> loss, loss_sums [K], counts [K], and {(s, flat i): (right_token, right_argmax)}"""
    sums, counted, right = [torch.zeros((), dtype=torch.float64) for _ in range(steps)], [0] * steps, {}
    layer = "midlayer."
    kept = list(range(target_head.shape[0])) if draft_to_target is None else draft_to_target.tolist()
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        x, m = input_ids[begin:end].tolist(), loss_mask[begin:end].tolist()
        length, states, first_keys, own = end - begin, {}, {}, {}
        for s in range(steps):
            for i in range(length - 1 if s == 0 else length):
                in_set = i + 2 + s < length and all(m[i + 1 : i + 2 + s])
                if s > 0 and not in_set:
                    continue
                state = fuse(p, c, aux_hidden[begin + i]) if s == 0 else states[i]
                embedding = p["embed_tokens.weight"][x[i + 1 + s]]
                embedding = rms_norm(embedding, p[layer + "input_layernorm.weight"], c.rms_norm_eps)
                normed = rms_norm(state, p[layer + "hidden_norm.weight"], c.rms_norm_eps)
                residual = normed if c.norm_before_residual else state
                query, key, value = query_key_value(p, c, torch.cat([embedding, normed]), i + s)
                if s == 0:
                    first_keys[i], own[i] = (key, value), []
                else:
                    own[i].append((key, value))
                if not in_set:
                    continue
                seen = [first_keys[j] for j in range(i + 1)] + own[i]
                scores = torch.stack([(query * key).sum(-1) for key, _ in seen]) * softmax_scale(c)  # [seen, h]
                share = torch.softmax(scores, 0)
                heads = sum(share[k].unsqueeze(1) * value for k, (_, value) in enumerate(seen))
                state = residual + p[layer + "self_attn.o_proj.weight"] @ heads.reshape(-1)
                inner = rms_norm(state, p[layer + "post_attention_layernorm.weight"], c.rms_norm_eps)
                gate = p[layer + "mlp.gate_proj.weight"] @ inner
                inner = gate * torch.sigmoid(gate) * (p[layer + "mlp.up_proj.weight"] @ inner)
                state = state + p[layer + "mlp.down_proj.weight"] @ inner
                output = rms_norm(state, p["norm.weight"], c.rms_norm_eps)
                states[i] = output if c.norm_output else state

                target = target_head @ rms_norm(last_hidden[begin + i + 1 + s], target_norm, target_norm_eps)
                best, logits = int(target.argmax()), target[kept]
                wanted = torch.softmax(logits, 0)
                proposed = p["lm_head.weight"] @ output
                counted[s] += 1
                if best in kept:
                    sums[s] = sums[s] - (wanted * torch.log_softmax(proposed, 0)).sum()
                choice = kept[int(proposed.argmax())]
                right[s, begin + i] = (choice == x[i + 2 + s], choice == best)
    divisors = counted if counts is None else counts
    loss = sum(step_weight**s * sums[s] / max(int(divisors[s]), 1) for s in range(steps))
    return loss, torch.stack(sums), torch.tensor(counted), right
