import Foundation
import ShardmillDecode

/// Conversations to write and answers to split, by formats of model.json.
private struct Texts: Decodable {
    struct Talk: Decodable {
        let format: String
        let messages: [[String]]
    }

    struct Answer: Decodable {
        let format: String
        let prompt: String
        let pieces: [String]
    }

    let formats: [String: ChatFormat]
    let seconds: Double
    let talks: [Talk]
    let answers: [Answer]
}

/// Write conversations as an app has them, on a day, and split answers into thoughts and text.
///
/// - Parameter arguments: TEXTS RESULT. What a format refuses is an object with the reason.
func texts(_ arguments: [String]) throws {
    guard arguments.count == 2 else { throw Usage("give a file of conversations and a file for the result") }
    let given: Texts
    do {
        given = try JSONDecoder().decode(Texts.self, from: read(URL(fileURLWithPath: arguments[0])))
    } catch let error as DecodingError {
        throw ShardmillError(.request, "\(arguments[0]): \(describe(error))")
    }
    func format(_ name: String) throws -> ChatFormat {
        guard let found = given.formats[name] else { throw Usage("there is no format \(name)") }
        return found
    }
    let talks: [Any] = try given.talks.map { talk in
        let messages = talk.messages.map { (ChatFormat.Role(rawValue: $0[0]) ?? .user, $0[1]) }
        do {
            return try format(talk.format).text(of: messages, on: Date(timeIntervalSince1970: given.seconds))
        } catch let error as ShardmillError {
            return ["refused": error.message]
        }
    }
    let answers: [Any] = try given.answers.map { answer in
        let format = try format(answer.format)
        var reader = AnswerReader(format, opened: format.thoughts?.isOpened(by: answer.prompt) ?? false)
        var pieces = answer.pieces.flatMap { reader.push($0) }
        pieces += reader.push("", ended: true)
        return pieces.map { piece in
            switch piece {
            case .thought(let text): ["thought", text]
            case .text(let text): ["content", text]
            case .call(let text): ["call", text]
            }
        }
    }
    try write(["talks": talks, "answers": answers], to: URL(fileURLWithPath: arguments[1]))
}
