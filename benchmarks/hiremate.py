"""What HiRemate's table 3 says of its twelve models (Gusak et al. 2024).

`PLANS`: peak relative to plain, overhead predicted in percent, minutes to solve, with a commercial
solver. `STRUCTURE`: nodes before merging, forward, with backward; levels, blocks, unique blocks,
members of the largest.
"""

from __future__ import annotations

__all__ = ["PLANS", "STRUCTURE"]

PLANS = {
    "unet": (0.513, 13.5, 9.0),
    "fno-1d": (0.531, 14.7, 2.5),
    "fno-3d": (0.472, 17.4, 4.0),
    "u-fno": (0.567, 16.3, 16.3),
    "uno": (0.585, 21.9, 46.0),
    "resnet-101": (0.426, 15.3, 5.5),
    "regnet-32": (0.411, 7.0, 5.0),
    "mlp-mixer": (0.533, 7.3, 1.5),
    "transformer-6-6": (0.469, 17.6, 20.0),
    "gpt-24": (0.366, 22.3, 7.9),
    "transformer-36-36": (0.446, 18.4, 147.0),
    "gpt-96": (0.472, 19.6, 15.0),
}

STRUCTURE = {
    "gpt-24": (1858, 367, 734, 3, 28, 8, 15),
    "gpt-96": (7402, 1447, 2894, 4, 61, 21, 10),
    "unet": (73, 50, 101, 2, 9, 9, 15),
    "mlp-mixer": (203, 125, 250, 2, 15, 6, 10),
    "regnet-32": (245, 173, 347, 2, 15, 10, 15),
    "resnet-101": (346, 211, 423, 2, 19, 10, 15),
    "transformer-6-6": (1030, 224, 417, 3, 23, 20, 17),
    "transformer-36-36": (6160, 1334, 2457, 16, 128, 67, 19),
    "fno-1d": (71, 42, 82, 2, 10, 5, 8),
    "fno-3d": (317, 64, 121, 2, 12, 12, 10),
    "u-fno": (567, 118, 221, 2, 11, 9, 17),
    "uno": (997, 129, 229, 4, 12, 12, 19),
}
