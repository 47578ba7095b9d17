// Written by swift/scripts/write_ziggurat.py, which explains the numbers.

import Foundation

/// The layers of the ziggurat for exponential variables, for 53-bit integers.
enum Ziggurat {
    /// The right edge of each layer; layer 0 is the base, whose tail begins at the last edge.
    private static let edges: [Double] = [
        0x1.164ec94bf5dc1p+3, 0x1.0589d8b5d4119p-4, 0x1.ad6b2495b4d2bp-4, 0x1.19335a95b8dbap-3,
        0x1.522e6e54a2a73p-3, 0x1.85090fbc27a80p-3, 0x1.b38d1ef79b7ccp-3, 0x1.decd8b76dbd98p-3,
        0x1.03bf049c65c3cp-2, 0x1.170db24d6f670p-2, 0x1.2980290da2633p-2, 0x1.3b388fe3d6ecap-2,
        0x1.4c515c60bfe21p-2, 0x1.5cdf89d024ac3p-2, 0x1.6cf40f0a72bbdp-2, 0x1.7c9cdda17d019p-2,
        0x1.8be5954d3606fp-2, 0x1.9ad80552237d2p-2, 0x1.a97c8be5d5203p-2, 0x1.b7da5dddda3c4p-2,
        0x1.c5f7bd78c3f89p-2, 0x1.d3da24df17c36p-2, 0x1.e186678f1735ap-2, 0x1.ef00ccf5f4faap-2,
        0x1.fc4d25d683209p-2, 0x1.04b76ed6a7558p-1, 0x1.0b348479b80fcp-1, 0x1.119f38749f5afp-1,
        0x1.17f8ceb4bdfa0p-1, 0x1.1e426e93e49e7p-1, 0x1.247d26538ff2ep-1, 0x1.2aa9ee123680bp-1,
        0x1.30c9aa526da4bp-1, 0x1.36dd2e26d8202p-1, 0x1.3ce53d12162a0p-1, 0x1.42e28ca706748p-1,
        0x1.48d5c5f35e712p-1, 0x1.4ebf86bcd0b93p-1, 0x1.54a0629786f4dp-1, 0x1.5a78e3db8befdp-1,
        0x1.60498c7dd2ecfp-1, 0x1.6612d6d0c68e0p-1, 0x1.6bd5362faa944p-1, 0x1.71911797990bbp-1,
        0x1.7746e23077973p-1, 0x1.7cf6f7c7e8172p-1, 0x1.82a1b53fed599p-1, 0x1.884772f2be1ecp-1,
        0x1.8de8850d0c52ap-1, 0x1.93853bdfda244p-1, 0x1.991de42ad1338p-1, 0x1.9eb2c75ff03bfp-1,
        0x1.a4442be14884ap-1, 0x1.a9d255396d261p-1, 0x1.af5d844f224c9p-1, 0x1.b4e5f794c979bp-1,
        0x1.ba6beb33f8f89p-1, 0x1.bfef99359fe99p-1, 0x1.c57139a70d29fp-1, 0x1.caf102bc25adbp-1,
        0x1.d06f28ef0e6fbp-1, 0x1.d5ebdf1d86b8dp-1, 0x1.db6756a429057p-1, 0x1.e0e1bf77c31fep-1,
        0x1.e65b483cf1044p-1, 0x1.ebd41e5e21b62p-1, 0x1.f14c6e202949fp-1, 0x1.f6c462b57feb5p-1,
        0x1.fc3c26504a9a1p-1, 0x1.00d9f119a3cd9p+0, 0x1.0395df60db162p+0, 0x1.0651f1c7276f8p+0,
        0x1.090e3bb4b0072p+0, 0x1.0bcad03710137p+0, 0x1.0e87c207a2f66p+0, 0x1.114523917ac15p+0,
        0x1.140306f707dbep+0, 0x1.16c17e1777ffbp+0, 0x1.19809a93d2396p+0, 0x1.1c406dd3d5283p+0,
        0x1.1f01090a9c4e2p+0, 0x1.21c27d3b10e05p+0, 0x1.2484db3c2a329p+0, 0x1.274833bd0189fp+0,
        0x1.2a0c9748bcdaap+0, 0x1.2cd2164a53b5dp+0, 0x1.2f98c11031721p+0, 0x1.3260a7cfb7611p+0,
        0x1.3529daa8a1ba1p+0, 0x1.37f469a851af0p+0, 0x1.3ac064ccfeffcp+0, 0x1.3d8ddc08d336dp+0,
        0x1.405cdf44f09c4p+0, 0x1.432d7e6466cd0p+0, 0x1.45ffc94716ca7p+0, 0x1.48d3cfcc883c4p+0,
        0x1.4ba9a1d6b18a4p+0, 0x1.4e814f4cb45eap+0, 0x1.515ae81d900fbp+0, 0x1.54367c42cb5f8p+0,
        0x1.57141bc316f27p+0, 0x1.59f3d6b4e9cf9p+0, 0x1.5cd5bd4119335p+0, 0x1.5fb9dfa56cf26p+0,
        0x1.62a04e3731a2ep+0, 0x1.65891965c9b8cp+0, 0x1.687451bd3ebeep+0, 0x1.6b6207e8d3cdfp+0,
        0x1.6e524cb59a608p+0, 0x1.714531150a9fbp+0, 0x1.743ac61fa041cp+0, 0x1.77331d177d130p+0,
        0x1.7a2e476b1240ap+0, 0x1.7d2c56b7d17f7p+0, 0x1.802d5ccce7277p+0, 0x1.83316badfe62ap+0,
        0x1.86389596108e7p+0, 0x1.8942ecfa40f54p+0, 0x1.8c50848cc6094p+0, 0x1.8f616f3fe1513p+0,
        0x1.9275c048e73e1p+0, 0x1.958d8b235828ap+0, 0x1.98a8e3940bbf4p+0, 0x1.9bc7ddac7035dp+0,
        0x1.9eea8dcdde951p+0, 0x1.a21108ad0592dp+0, 0x1.a53b63556c690p+0, 0x1.a869b32d0f30fp+0,
        0x1.ab9c0df81657ap+0, 0x1.aed289dcaacffp+0, 0x1.b20d3d66e8bb5p+0, 0x1.b54c3f8cf2542p+0,
        0x1.b88fa7b324fb6p+0, 0x1.bbd78db072610p+0, 0x1.bf2409d2dfd85p+0, 0x1.c27534e42e02dp+0,
        0x1.c5cb282eab1a4p+0, 0x1.c925fd82323fbp+0, 0x1.cc85cf395a56cp+0, 0x1.cfeab83ed7180p+0,
        0x1.d354d4130f2adp+0, 0x1.d6c43ed1ea3fep+0, 0x1.da391538da50ap+0, 0x1.ddb374ad2357fp+0,
        0x1.e1337b426509bp+0, 0x1.e4b947c16a452p+0, 0x1.e844f9af4237fp+0, 0x1.ebd6b154a7678p+0,
        0x1.ef6e8fc5b9168p+0, 0x1.f30cb6ea0bc7fp+0, 0x1.f6b1498515ed0p+0, 0x1.fa5c6b3efe1e5p+0,
        0x1.fe0e40add09d8p+0, 0x1.00e377af911d4p+1, 0x1.02c34ef11391bp+1, 0x1.04a6b9e9224a3p+1,
        0x1.068dccf1126dbp+1, 0x1.08789cf3aad0fp+1, 0x1.0a673f733c819p+1, 0x1.0c59ca900946fp+1,
        0x1.0e50550efcfb7p+1, 0x1.104af660befcep+1, 0x1.1249c6a92154ap+1, 0x1.144cdec6f3a2bp+1,
        0x1.1654585c404c1p+1, 0x1.18604dd6fae9ep+1, 0x1.1a70da7a27820p+1, 0x1.1c861a6782a5ap+1,
        0x1.1ea02aa9b3370p+1, 0x1.20bf293f0f4a2p+1, 0x1.22e33524fe550p+1, 0x1.250c6e6403bbap+1,
        0x1.273af61c7daa6p+1, 0x1.296eee942532bp+1, 0x1.2ba87b445db51p+1, 0x1.2de7c0e962d70p+1,
        0x1.302ce59265965p+1, 0x1.327810b2aa7d0p+1, 0x1.34c96b33bc965p+1, 0x1.37211f88ca856p+1,
        0x1.397f59c345143p+1, 0x1.3be447a8d8b83p+1, 0x1.3e5018cadded0p+1, 0x1.40c2fe9f5eeadp+1,
        0x1.433d2c9bd42f8p+1, 0x1.45bed851bc92cp+1, 0x1.4848398d39432p+1, 0x1.4ad98a75da14cp+1,
        0x1.4d7307b1cb127p+1, 0x1.5014f08b99508p+1, 0x1.52bf871acaab2p+1, 0x1.5573106f8a75ap+1,
        0x1.582fd4c1b4461p+1, 0x1.5af61fa38e107p+1, 0x1.5dc640388bd9ep+1, 0x1.60a0897081879p+1,
        0x1.63855247b2e94p+1, 0x1.6674f60c3f432p+1, 0x1.696fd4a9748eep+1, 0x1.6c7652f9a7b1ep+1,
        0x1.6f88db1f42507p+1, 0x1.72a7dce5cd218p+1, 0x1.75d3ce2bd71c3p+1, 0x1.790d2b56b71f9p+1,
        0x1.7c5477d1476d3p+1, 0x1.7faa3e96e1412p+1, 0x1.830f12cc0bec3p+1, 0x1.8683906687342p+1,
        0x1.8a085ce695babp+1, 0x1.8d9e2823b3695p+1, 0x1.9145ad2f37544p+1, 0x1.94ffb34fc2a0ep+1,
        0x1.98cd0f18d1ad8p+1, 0x1.9caea3a24d9eap+1, 0x1.a0a563e49f178p+1, 0x1.a4b2543e84c3bp+1,
        0x1.a8d68c2ad86eap+1, 0x1.ad13382d845c4p+1, 0x1.b1699c003b60ap+1, 0x1.b5db15091ea0fp+1,
        0x1.ba691d276da5ep+1, 0x1.bf154de4bef77p+1, 0x1.c3e1641c2e0a7p+1, 0x1.c8cf442c8c8f4p+1,
        0x1.cde0fecf2a97fp+1, 0x1.d318d6b2738c5p+1, 0x1.d87946fec3becp+1, 0x1.de050af4ef19fp+1,
        0x1.e3bf26e190960p+1, 0x1.e9aaf2af383c1p+1, 0x1.efcc26750ea4ap+1, 0x1.f626e9791f7a7p+1,
        0x1.fcbfe43f6c6e5p+1, 0x1.01ce2b362ec2ep+2, 0x1.056118bf58eefp+2, 0x1.091c1cdcba54ep+2,
        0x1.0d031785d48a0p+2, 0x1.111a8034392a6p+2, 0x1.156786775442ap+2, 0x1.19f03bcb3c2d6p+2,
        0x1.1ebbca0c9fa7cp+2, 0x1.23d2bb659919fp+2, 0x1.293f5ae49aaa5p+2, 0x1.2f0e38a4411f0p+2,
        0x1.354ee27ccf75ep+2, 0x1.3c14ec7c8b861p+2, 0x1.4379766e41362p+2, 0x1.4b9d7cd4751d1p+2,
        0x1.54ad83ccf73f6p+2, 0x1.5ee7ae17313d2p+2, 0x1.6aa676d4bbf72p+2, 0x1.78750d6eac62fp+2,
        0x1.8939fe6f2ed19p+2, 0x1.9e9dc0d487b85p+2, 0x1.bc39e51da71fcp+2, 0x1.ec9d9297ebb83p+2,
    ]
    static let tail = edges[255]
    /// The factor of a layer's integers.
    static let widths = edges.map { $0 * 0x1p-53 }
    /// Integers below this lie inside the layer above too.
    static let inside = edges.indices.map { i in
        i == 1 ? 0 : UInt64((i == 0 ? tail / edges[0] : edges[i - 1] / edges[i]) * 0x1p53)
    }
    /// The function at each edge.
    static let heights = edges.indices.map { $0 == 0 ? 1 : exp(-edges[$0]) }
}
