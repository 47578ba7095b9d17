import Foundation
import Shardmill
import ShardmillDecode
import ShardmillPipe

/// Label, classify or embed texts with an encoder's build, and write the result.
///
/// - Parameter arguments: BUILD TEXTS RESULT.
func read(_ arguments: [String]) async throws {
    guard arguments.count == 3 else { throw Usage("give a build's folder, a file of texts and a file for the result") }
    let texts: [String]
    let file = URL(fileURLWithPath: arguments[1])
    do {
        texts = try JSONDecoder().decode([String].self, from: read(file))
    } catch let error as DecodingError {
        throw ShardmillError(.request, "\(file.path): \(describe(error))")
    }
    #if canImport(ObjectiveC)
    let model = try ShardmillEncoder(at: URL(fileURLWithPath: arguments[0]))
    #else
    let model = try ShardmillEncoder(at: URL(fileURLWithPath: arguments[0])) { _ in try openPipe() }
    #endif
    let found: [Any]
    switch model.manifest.task {
    case .tokens: found = zip(texts, try await model.label(texts)).map { described($1, of: $0) }
    case .texts:
        found = try await model.classify(texts).map {
            Dictionary(uniqueKeysWithValues: $0.map { ($0.label, $0.share) })
        }
    case .embeddings: found = try await model.embed(texts).map { $0.map(Double.init) }
    }
    try JSONSerialization.data(withJSONObject: found).write(to: URL(fileURLWithPath: arguments[2]))
}

private func described(_ found: Labelled, of text: String) -> [String: Any] {
    let spans = found.spans.map { span in
        [
            "start": span.range.lowerBound, "end": span.range.upperBound, "type": span.type, "score": span.score,
            "text": span.text(in: text),
        ] as [String: Any]
    }
    return ["spans": spans, "tokens": found.tokens, "windows": found.windows, "exact": found.isExact]
}
