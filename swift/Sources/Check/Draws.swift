import Foundation
import ShardmillDecode
import ShardmillText

/// What generators in tests/swift draw; what is left out is not compared.
private struct Draws: Decodable {
    struct Samples: Decodable {
        let rows: String
        let vocab: Int
        let requests: [Request]
    }

    struct Streams: Decodable {
        struct One: Decodable {
            let tokens: [Int]
            let stop: [String]
        }

        let tokenizer: String
        let requests: [One]
    }

    let samples: Samples?
    let streams: Streams?
    let builds: [String]?
    let answers: [String]?
}

/// Sample tokens, stream texts, open builds and read calls of functions as a file says, and write what came out.
///
/// - Parameter arguments: DRAWS RESULT.
func draw(_ arguments: [String]) throws {
    guard arguments.count == 2 else { throw Usage("draw takes DRAWS RESULT") }
    let given: Draws
    do {
        given = try JSONDecoder().decode(Draws.self, from: read(URL(fileURLWithPath: arguments[0])))
    } catch let error as DecodingError {
        throw ShardmillError(.request, "\(arguments[0]): \(describe(error))")
    }
    var found: [String: Any] = [:]
    if let samples = given.samples { found["samples"] = try sampled(samples) }
    if let streams = given.streams { found["streams"] = try streamed(streams) }
    if let builds = given.builds { found["builds"] = builds.map { opened(URL(fileURLWithPath: $0)) } }
    if let answers = given.answers {
        found["answers"] = answers.map { answer -> [String: Any] in
            let (text, calls) = FunctionCall.read(answer)
            return ["text": text, "calls": calls.map { [$0.name, $0.arguments] }]
        }
    }
    try write(found, to: URL(fileURLWithPath: arguments[1]))
}

/// Draw the tokens of requests: each step reads the next of the file's rows [N, V], in raw fp32.
private func sampled(_ samples: Draws.Samples) throws -> [[Int]] {
    let data = try read(URL(fileURLWithPath: samples.rows))
    let (size, count) = (4 * samples.vocab, data.count / (4 * samples.vocab))
    let rows = (0..<count).map { place in
        Logits(
            values: [Float](unsafeUninitializedCapacity: samples.vocab) { into, filled in
                let row = data[(data.startIndex + place * size)..<(data.startIndex + (place + 1) * size)]
                filled = row.copyBytes(to: UnsafeMutableRawBufferPointer(into)) / 4
            }, tokens: 1)
    }
    return try samples.requests.enumerated().map { place, request in
        var sampler = Sampler(request.options.sampling, prompt: request.prompt ?? [], vocab: samples.vocab)
        return try (0..<request.options.maxTokens).map { try sampler.next(rows[(place + $0) % count], 0) }
    }
}

/// Return the pieces of each text as its tokens come, the rest last, and whether a stop string ended it.
private func streamed(_ streams: Draws.Streams) throws -> [[String: Any]] {
    let tokenizer = try Tokenizer(URL(fileURLWithPath: streams.tokenizer))
    return try streams.requests.map { one in
        var stream = try TextStream(stop: one.stop) { tokenizer.decode($0, skipSpecialTokens: false) }
        let pieces = one.tokens.map { stream.push($0) }
        return ["pieces": pieces + [stream.flush()], "stopped": stream.stopped]
    }
}

/// Open a build as an app does, but for its programs; return what is wrong with it, or nothing.
private func opened(_ folder: URL) -> String {
    do {
        let manifest = try Manifest(folder: folder)
        let tokenizer = try Tokenizer(manifest.tokenizer)
        let table = try Table(manifest.embedding)
        _ = try table.columns(of: [0])
        _ = tokenizer.decode(try tokenizer.encode("In 1999 the 12 ships left; <|end|> 東京へ e\u{301}"))
        if let expected = manifest.expected { _ = try Expected(expected) }
        return ""
    } catch {
        return (error as? ShardmillError)?.message ?? "no error of the package's own: \(error)"
    }
}
