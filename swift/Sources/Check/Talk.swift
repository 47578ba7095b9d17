import Foundation
import Shardmill
import ShardmillDecode
import ShardmillPipe

/// A conversation to have with a model.
private struct Talk: Decodable {
    let instructions: String?
    let questions: [String]
    let max_tokens: Int
    let temperature: Double?
    let seed: UInt64?
}

/// Have conversations with a build, as an app has them, and write the answers.
///
/// - Parameter arguments: BUILD TALKS RESULT.
func talk(_ arguments: [String]) async throws {
    guard arguments.count == 3 else { throw Usage("give a build's folder, a file of talks and a file for the result") }
    let file = URL(fileURLWithPath: arguments[1])
    let talks: [Talk]
    do {
        talks = try JSONDecoder().decode([Talk].self, from: read(file))
    } catch let error as DecodingError {
        throw ShardmillError(.request, "\(file.path): \(describe(error))")
    }
    #if canImport(ObjectiveC)
    let model = try ShardmillModel(at: URL(fileURLWithPath: arguments[0]))
    #else
    let model = try ShardmillModel(at: URL(fileURLWithPath: arguments[0])) { _, _ in try openPipe() }
    #endif
    var found: [[[String: Any]]] = []
    for talk in talks {
        var options = ShardmillOptions(maxTokens: talk.max_tokens, temperature: talk.temperature ?? 0)
        options.sampling.seed = talk.seed ?? 0
        let chat = model.chat(instructions: talk.instructions ?? "")
        var turns: [[String: Any]] = []
        for question in talk.questions {
            var answer = ""
            for try await piece in chat.stream(question, options: options) { answer += piece }
            guard let last = await chat.last else { continue }
            turns.append([
                "answer": answer, "reason": last.reason.rawValue, "tokens": last.tokens,
                "prompt_tokens": last.promptTokens, "reused": last.promptTokensReused,
            ])
        }
        found.append(turns)
    }
    try write(["model": model.manifest.model, "talks": found], to: URL(fileURLWithPath: arguments[2]))
}
