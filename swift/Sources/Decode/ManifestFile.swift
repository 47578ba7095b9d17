import Foundation

/// The numbers of a recurrence (gated DeltaNet, Mamba-2).
package struct Recurrence: Decodable, Sendable {
    /// B, the most tokens that are folded at once, and the most by which its state may lag behind the text.
    package let block: Int
    /// L, the number of taps of its convolution.
    package let taps: Int
    /// A pass of more tokens has several blocks; nil if no pass has more than B.
    package let narrow: Int?
}

/// model.json as it is written; `Manifest` is what it means.
struct RawManifest: Decodable {
    struct Entry: Decodable {
        let path: String
        let bytes: Int?
    }

    struct Usual: Decodable {
        let temperature, top_p, min_p, repetition_penalty: Double?
        let top_k: Int?
    }

    struct Window: Decodable {
        let value: Int?
        init(from decoder: Decoder) throws {
            let single = try decoder.singleValueContainer()
            value = single.decodeNil() ? nil : try single.decode(Int.self)
        }
    }

    let model: String
    let context, tokens_max: Int
    let widths: [Int]
    let verify: Int?
    let margin: Double?
    let reshape_frequency: String?
    let contexts: [Int]?
    let vocab: Int
    let eos_token_ids: [Int]
    let rope: [String: RopeTable]
    let window: Window
    let window_slots, conv_taps: Int
    let recurrent: Recurrence?
    let adapters: Int?
    let embedding, tokenizer: Entry
    let expected: Entry?
    let parts: [RawPart]
    let packages: [String: Entry]?
    let chat: ChatFormat?
    let sampling: Usual?
    let drafter: RawDrafter?
    let uses: [String]?
    let requires: [String: String]?

    private enum Keys: String, CodingKey {
        case format, model, context, tokens_max, widths, verify, margin, reshape_frequency, contexts, vocab,
            eos_token_ids
        case rope, window, window_slots, conv_taps, recurrent, adapters, embedding, tokenizer, parts, packages, chat
        case conversation
        case sampling, uses, drafter, requires, buckets, expected
    }

    init(from decoder: Decoder) throws {
        let keys = try decoder.container(keyedBy: Keys.self)
        let format = try keys.decode(Int.self, forKey: .format)
        if format != 2 {
            throw ShardmillError(.build, "model.json is of format \(format); this version reads format 2")
        }
        if keys.contains(.buckets) {
            throw ShardmillError(.build, "model.json is an encoder's: open it with ShardmillEncoder")
        }
        model = try keys.decode(String.self, forKey: .model)
        context = try keys.decode(Int.self, forKey: .context)
        tokens_max = try keys.decode(Int.self, forKey: .tokens_max)
        widths = try keys.decode([Int].self, forKey: .widths)
        verify = try keys.decodeIfPresent(Int.self, forKey: .verify)
        margin = try keys.decodeIfPresent(Double.self, forKey: .margin)
        reshape_frequency = try keys.decodeIfPresent(String.self, forKey: .reshape_frequency)
        contexts = try keys.decodeIfPresent([Int].self, forKey: .contexts)
        vocab = try keys.decode(Int.self, forKey: .vocab)
        eos_token_ids = try keys.decode([Int].self, forKey: .eos_token_ids)
        rope = try keys.decode([String: RopeTable].self, forKey: .rope)
        window = try keys.decode(Window.self, forKey: .window)  // null is a value, absence is an error
        window_slots = try keys.decode(Int.self, forKey: .window_slots)
        conv_taps = try keys.decode(Int.self, forKey: .conv_taps)
        recurrent = try keys.decodeIfPresent(Recurrence.self, forKey: .recurrent)
        adapters = try keys.decodeIfPresent(Int.self, forKey: .adapters)
        embedding = try keys.decode(Entry.self, forKey: .embedding)
        tokenizer = try keys.decode(Entry.self, forKey: .tokenizer)
        expected = try keys.decodeIfPresent(Entry.self, forKey: .expected)
        parts = try keys.decode([RawPart].self, forKey: .parts)
        packages = try keys.decodeIfPresent([String: Entry].self, forKey: .packages)
        // What says more than `chat` is read only if all of it is known.
        let more = try? keys.nestedContainer(keyedBy: AnyKey.self, forKey: .conversation).allKeys.map(\.stringValue)
        let isKnown = more.map { Set($0).isSubset(of: ChatFormat.CodingKeys.allCases.map(\.rawValue)) } ?? false
        chat = try keys.decodeIfPresent(ChatFormat.self, forKey: isKnown ? .conversation : .chat)
        sampling = try keys.decodeIfPresent(Usual.self, forKey: .sampling)
        drafter = try keys.decodeIfPresent(RawDrafter.self, forKey: .drafter)
        uses = try keys.decodeIfPresent([String].self, forKey: .uses)
        requires = try keys.decodeIfPresent([String: String].self, forKey: .requires)
    }
}

extension Sampling {
    /// Make the sampling that model.json names; what it does not name changes nothing.
    init(_ usual: RawManifest.Usual) {
        self.init()
        temperature = usual.temperature ?? 1
        topP = usual.top_p ?? 1
        topK = usual.top_k ?? 0
        minP = usual.min_p ?? 0
        repetitionPenalty = usual.repetition_penalty ?? 1
    }
}

struct RawDrafter: Decodable {
    let kind: String
    let taps: [Int]
    let vocab: Int
    let tokens: String?
    let rope: [String: RopeTable]
}

struct RawPart: Decodable {
    struct Program: Decodable {
        let path: String
        let bytes: Int?
        let bundles: [String: String]?
        let compiler: [String: String]?
    }

    struct Shorter: Decodable {
        let functions: [String: String]
        let inputs: [String: [Part.Extent]]?
        let states: [String: [Int]]?
    }

    let name, kind: String
    let start, end: Int
    let inputs: [String: [Part.Extent]]
    let states: [String: [Int]]
    let written: [String: String]?
    let taps: [String: Int]?
    let drafter: Bool?
    let adapters: [String: [Int]]?
    let lent: [String]?
    let functions: [String: String]?
    let contexts: [String: Shorter]?
    let program: Program
}

/// A key of an object whose keys are not known.
private struct AnyKey: CodingKey {
    let stringValue: String
    var intValue: Int? { nil }
    init(stringValue: String) { self.stringValue = stringValue }
    init?(intValue: Int) { nil }
}

extension Part.Extent: Decodable {
    package init(from decoder: Decoder) throws {
        let single = try decoder.singleValueContainer()
        if let number = try? single.decode(Int.self) {
            self = .fixed(number)
        } else if try single.decode(String.self) == "T" {
            self = .tokens
        } else {
            throw DecodingError.dataCorruptedError(in: single, debugDescription: "an extent is a number or \"T\"")
        }
    }
}

/// Return what JSON says, and of a key that stands twice the last, as Python does.
///
/// Foundation's decoder ends the process where a key is no text ("\ud800", bytes that are no UTF-8, a raw newline). The
/// other reader of Foundation refuses these, so it reads first, and the decoder gets what it wrote.
func decoded<Content: Decodable>(_ type: Content.Type, from data: Data) throws -> Content {
    let read: Any
    do { read = try JSONSerialization.jsonObject(with: data) } catch {
        let context = DecodingError.Context(codingPath: [], debugDescription: "it is no JSON")
        throw DecodingError.dataCorrupted(context)
    }
    guard JSONSerialization.isValidJSONObject(read) else {
        throw DecodingError.dataCorrupted(.init(codingPath: [], debugDescription: "a number in it has no end"))
    }
    return try JSONDecoder().decode(type, from: JSONSerialization.data(withJSONObject: read))
}

/// Return where JSON does not have the shape that is expected, in one line.
package func describe(_ error: any Error) -> String {
    guard let error = error as? DecodingError else { return "\(error)" }
    func place(_ context: DecodingError.Context, _ last: String? = nil) -> String {
        let path = context.codingPath.map { step in step.intValue.map { "[\($0)]" } ?? step.stringValue }
        let steps = path + (last.map { [$0] } ?? [])
        return steps.isEmpty ? "it" : steps.joined(separator: ".")
    }
    switch error {
    case .keyNotFound(let key, let context): return "\(place(context, key.stringValue)) is missing"
    case .typeMismatch(let type, let context): return "\(place(context)) is no \(type)"
    case .valueNotFound(_, let context): return "\(place(context)) is null"
    case .dataCorrupted(let context) where context.codingPath.isEmpty: return context.debugDescription
    case .dataCorrupted(let context): return "\(place(context)) is not valid"
    @unknown default: return "\(error)"
    }
}
