import Foundation
import ShardmillDecode

/// A device kit that is unpacked: builds, and the inputs and outputs of their programs in recorded passes.
struct Kit {
    let folder: URL
    let content: Content

    struct Content: Decodable {
        let format: Int
        let limits: Limits
        let variants: [Variant]
    }

    struct Limits: Decodable {
        /// The least peak signal-to-noise ratio of an output, in dB.
        let psnr: Double
    }

    struct Variant: Decodable {
        let name: String
        let model: String
        let artifacts: [String: [String: String]]
        let parts: [Part]
        /// Passes by width; a pass has an entry for each part that runs in it.
        let recorded: [String: [[String: Pass]]]
    }

    struct Part: Decodable {
        let name: String
        let output: String
        let stateful: Bool
        let programs: [Program]
    }

    struct Program: Decodable {
        let path: String
        let function: String?
        let widths: [Int]
    }

    struct Pass: Decodable {
        let inputs: [String: String]
        let fp32: String
        let fp16: String
        /// The step between recorded channels.
        let stride: Int
    }

    /// Read the kit.json of a folder.
    init(_ folder: URL) throws {
        self.folder = folder
        guard let data = try? Data(contentsOf: folder.appendingPathComponent("kit.json")) else {
            throw ShardmillError(.request, "\(folder.path) has no kit.json: give an unpacked device kit")
        }
        do {
            content = try JSONDecoder().decode(Content.self, from: data)
        } catch {
            throw ShardmillError(.request, "\(folder.path)/kit.json is damaged: \(describe(error))")
        }
        if content.format != 1 {
            throw ShardmillError(.request, "the kit is of format \(content.format); this version reads 1")
        }
    }

    /// Return the folder of a variant's build; a shorter context is in the folder of the whole one.
    func build(_ variant: Variant) throws -> URL {
        let path = variant.parts.first?.programs.first?.path ?? ""
        let steps = path.split(separator: "/")
        if steps.count < 3 || steps.contains("..") || path.hasPrefix("/") {
            throw ShardmillError(.request, "kit.json: the programs of \(variant.name) have no path in the kit")
        }
        return folder.appendingPathComponent(steps[..<2].joined(separator: "/"))
    }

    /// Return a recorded array, which may be fp16 or fp32 on disk.
    func array(_ key: String) throws -> HostArray {
        let file = folder.appendingPathComponent("arrays/\(key.filter { $0.isHexDigit }).npy")
        guard let data = try? Data(contentsOf: file) else { throw ShardmillError(.request, "\(file.path) is missing") }
        return try Self.npy([UInt8](data), file)
    }

    /// Parse NumPy's format, version 1.0, as the recorder writes it: little-endian, C order.
    private static func npy(_ bytes: [UInt8], _ file: URL) throws -> HostArray {
        func damaged() -> ShardmillError { ShardmillError(.request, "\(file.path) is damaged") }
        guard bytes.count >= 10, bytes[0] == 0x93, Array(bytes[1..<6]) == Array("NUMPY".utf8) else {
            throw damaged()
        }
        let start = 10 + Int(bytes[8]) + Int(bytes[9]) << 8
        guard start <= bytes.count, let header = String(bytes: bytes[10..<start], encoding: .utf8) else {
            throw damaged()
        }
        let isHalf = header.contains("'<f2'")
        guard isHalf || header.contains("'<f4'"), header.contains("'fortran_order': False"),
            let from = header.firstIndex(of: "("), let to = header.firstIndex(of: ")")
        else { throw damaged() }
        let shape = header[header.index(after: from)..<to].split(separator: ",").compactMap {
            Int($0.trimmingCharacters(in: .whitespaces))
        }
        let size = isHalf ? 2 : 4
        let count = (bytes.count - start) / size
        let product = shape.reduce(1.0) { $0 * Double($1) }  // which does not overflow
        if product != Double(count) || bytes.count != start + count * size { throw damaged() }
        let values = (0..<count).map { i -> Float in
            let at = start + i * size
            let low = UInt16(bytes[at]) | UInt16(bytes[at + 1]) << 8
            if isHalf { return Half.float(low) }
            return Float(bitPattern: UInt32(low) | UInt32(bytes[at + 2]) << 16 | UInt32(bytes[at + 3]) << 24)
        }
        return HostArray(shape: shape, values: values)
    }
}
