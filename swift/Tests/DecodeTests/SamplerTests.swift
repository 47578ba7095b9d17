import Foundation
import Testing

@testable import ShardmillDecode

private struct Numbers: Decodable {
    let seed, index: String
    let raw: [String]
    let uniform, exponential: [Double]
}

@Test("random numbers are numpy's, bit for bit")
func generators() throws {
    for one in try vectors("generators", Numbers.self) {
        func philox() throws -> Philox {
            Philox(seed: try #require(UInt64(one.seed)), stream: 2, index: try #require(UInt64(one.index)))
        }
        var (raw, uniform, exponential) = (try philox(), try philox(), try philox())
        #expect(one.raw.map { UInt64($0)! } == one.raw.map { _ in raw.next() })
        #expect(one.uniform == one.uniform.map { _ in uniform.uniform() })
        #expect(one.exponential == one.exponential.map { _ in exponential.exponential() })
    }
}

private struct Drawn: Decodable {
    struct Settings: Decodable {
        let temperature, top_p, min_p, repetition_penalty: Double?
        let top_k: Int?
        let seed: UInt64?
        let logit_bias: [String: Double]
    }

    let sampling: Settings
    let prompt: [Int]
    let rows: [[Float]]
    let margin: Double?
    let tokens: [Int]

    var settings: Sampling {
        var found = Sampling()
        found.temperature = sampling.temperature ?? 0
        found.topP = sampling.top_p ?? 1
        found.minP = sampling.min_p ?? 0
        found.repetitionPenalty = sampling.repetition_penalty ?? 1
        found.topK = sampling.top_k ?? 0
        found.seed = sampling.seed ?? 0
        found.logitBias = Dictionary(uniqueKeysWithValues: sampling.logit_bias.map { (Int($0)!, $1) })
        return found
    }
}

@Test("tokens are drawn as in Python, with every filter")
func draws() throws {
    let cases = try vectors("samplers", Drawn.self)
    #expect(cases.count == 16)
    for one in cases {
        var sampler = Sampler(one.settings, prompt: one.prompt, vocab: one.rows[0].count)
        let logits = one.rows.map { Logits(values: $0, tokens: 1) }
        let margin = sampler.margin(logits[0], 0)
        let expected = one.margin ?? .infinity
        #expect(margin == expected || abs(margin - expected) <= 1e-9 * max(1, abs(margin)), "\(one.sampling)")
        #expect(logits.map { sampler.next($0, 0) } == one.tokens, "\(one.sampling)")
    }
}

@Test("the likeliest token of a wide pass is found in its column, and the first of equals wins")
func columns() {
    let logits = Logits(values: [1, 9, 5, 9, 5, 0], tokens: 2)  // [V = 3, T = 2]
    #expect(logits.argmax(0) == 1)
    #expect(logits.argmax(1) == 0)
    #expect(logits.row(1) == [9, 9, 0])
}

@Test(
    "a setting out of its range is refused",
    arguments: [
        \Sampling.temperature as WritableKeyPath<Sampling, Double> & Sendable, \.topP, \.minP, \.repetitionPenalty,
    ])
func refused(_ field: WritableKeyPath<Sampling, Double> & Sendable) {
    for value in [-1, .nan, .infinity] {
        var sampling = Sampling()
        sampling[keyPath: field] = value
        #expect(throws: ShardmillError.self) { try sampling.check(vocab: 10) }
    }
}
